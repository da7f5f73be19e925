# SPDX-License-Identifier: Apache-2.0
"""Weights of a sharded state as one safetensors file, and the names that torch has for them.

| NNX | array | torch | axes, from NNX's to torch's |
| --- | --- | --- | --- |
| `Linear` | ``kernel`` (in, out) | ``weight`` (out, in) | turned around |
| `Conv` | ``kernel`` (*window, in, out) | ``weight`` (out, in, *window) | last two in front |
| `Embed` | ``embedding`` (vocab, width) | ``weight`` | as they are |
| `LayerNorm`, `RMSNorm`, `GroupNorm`, `BatchNorm` | ``scale`` | ``weight`` | as they are |
| `BatchNorm` | ``mean``, ``var`` | ``running_mean``, ``running_var`` | as they are |
| any | everything else | the same name | as they are |

Modules need the same names in both, as ``blocks.0.attention.query``. Values are never touched, so a
way there and back is equal bit for bit.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fullshard.checkpoint.ranks import agree
from fullshard.core.boxes import Box
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.safetensors_format import (
    Entry,
    EntryPlace,
    FileWriter,
    entries_in,
    header_of,
    places_in,
)
from fullshard.jax.checkpoint import Leaf, Names, StoredAs, leaves_of, process_ranks
from fullshard.jax.placing import by_path, path_name, to_host
from fullshard.jax.state import TrainState


def save_weights(path: str | Path, state: TrainState, names: Names | None = None) -> None:
    """Write the parameters of ``state`` (and statistics, as of BatchNorm) to one safetensors file.

    With ``names``, as `fullshard.jax.torch_names` gives them, the file is what the torch model's
    ``load_state_dict`` wants, and only arrays with a name are in it; without, arrays are called by
    their paths here. One array is gathered at a time. The file appears at ``path`` when it is
    complete. With several processes all of them must call; process 0 writes.

    Raises:
        ConfigurationError: on all processes, if the file cannot be written or cannot hold a dtype.
    """
    target, leaves = Path(path), _leaves(state, names)
    header = header_of(_entries(leaves))
    with FileWriter(target, header) if jax.process_index() == 0 else nullcontext() as writer:
        for leaf in leaves:
            array = to_host(leaf.data)
            if writer is not None:
                raw = leaf.as_stored(array).reshape(-1).view(np.uint8).data
                for _ in (leaf.stored.name, *leaf.stored.aliases):
                    writer.append(raw)
    failed = ConfigurationError(str(writer.failure)) if writer and writer.failure else None
    agree(process_ranks(), f"could not write the weights to {target}", failed)


def load_weights(path: str | Path, state: TrainState, names: Names | None = None) -> TrainState:
    """The ``state`` with the weights of one safetensors file.

    The file is as `save_weights` writes it with the same ``names``, or as safetensors writes a
    torch model's ``state_dict()``; aliases of tied parameters may be missing. Any number of
    devices; a process reads what its devices hold. With several processes all of them must call,
    and all read the file.

    Raises:
        ConfigurationError: if the file cannot be read or does not fit: another array, shape or
            dtype, or tied parameters with different values.
    """
    source = Path(path)
    try:
        leaves, there = _leaves(state, names), entries_in(source)
        first = {alias: leaf.stored.name for leaf in leaves for alias in leaf.stored.aliases}
        wanted = {n: x for n, x in _entries(leaves).items() if n in there or n not in first}
        places = places_in(source, wanted)
        raw = {name: _bytes(source, place) for name, place in places.items()}
        for alias, name in first.items():
            if alias in there and not np.array_equal(raw[alias], raw[name]):
                raise ConfigurationError(
                    f"{alias!r} and {name!r} are one parameter in the model, and differ in the file"
                )
        made = {leaf.path: leaf.made(_reader(leaf, raw[leaf.stored.name])) for leaf in leaves}
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"cannot load the weights in {source}: {error}") from error
    params = jax.tree.map_with_path(lambda path, _: made[path_name(path)], state.params)
    other = {name: made.get(name, x) for name, x in state.other.items()}
    return dataclasses.replace(state, params=params, other=other)


def _leaves(state: TrainState, names: Names | None) -> list[Leaf]:
    """The contents of the file, in its order."""
    if not isinstance(state, TrainState):
        raise ConfigurationError(f"expected a TrainState, got {type(state).__name__}")
    params = by_path(state.params)
    arrays = {**params, **state.other}
    names = {path: StoredAs(path) for path in arrays} if names is None else names
    for path in params.keys() - names.keys():
        raise ConfigurationError(f"no name is given for the parameter {path!r}")
    return leaves_of({path: x for path, x in arrays.items() if path in names}, names)


def _entries(leaves: Iterable[Leaf]) -> dict[str, Entry]:
    return {name: leaf.entry for leaf in leaves
            for name in (leaf.stored.name, *leaf.stored.aliases)}  # fmt: skip


def _bytes(source: Path, place: EntryPlace) -> NDArray[np.uint8]:
    """The bytes of one entry, read where they are looked at."""
    size = place.entry.size_bytes
    return np.memmap(source, np.uint8, "r", place.start, (size,)) if size else np.empty(0, np.uint8)


def _reader(leaf: Leaf, raw: NDArray[np.uint8]) -> Callable[[Box], NDArray[Any]]:
    """Read boxes of one array, into memory of their own."""
    whole = raw.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape)
    return lambda box: np.array(
        whole[tuple(map(slice, box.offsets, np.add(box.offsets, box.sizes)))]
    )


# -- torch -----------------------------------------------------------------------------------------


_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm)
# Their arrays have no counterpart that is only turned or named otherwise.
_UNLIKE = (nnx.LinearGeneral, nnx.Einsum, nnx.ConvTranspose)


def torch_names(model: nnx.Module, tied: Mapping[str, str] | None = None) -> dict[str, StoredAs]:
    """The name in torch of each array of ``model``, by its path here, as ``norm.scale``.

    Only the structure is looked at, so ``model`` may be abstract (`nnx.eval_shape`). State of
    random numbers is left out; torch has none of it. ``tied`` are further names of parameters in
    the torch model, as ``{"output.weight": "embedding.weight"}``.

    Raises:
        NotSupportedError: for a module whose arrays have other shapes in torch.
        ConfigurationError: for a name in ``tied`` that no array has.
    """
    names: dict[str, StoredAs] = {}
    for path, module in nnx.iter_modules(model):
        for attribute, variable in vars(module).items():
            if not isinstance(variable, nnx.Variable) or isinstance(variable, nnx.RngState):
                continue
            if isinstance(module, _UNLIKE):
                raise NotSupportedError(
                    f"{_dotted(path)} is a {type(module).__name__}, whose arrays have other shapes "
                    "in torch: give names of your own"
                )
            last, axes = _in_torch(module, attribute, variable.ndim)
            name = _dotted((*path, last))
            aliases = tuple(alias for alias, other in (tied or {}).items() if other == name)
            names[_dotted((*path, attribute))] = StoredAs(name, axes, aliases=aliases)
    there = {each.name for each in names.values()}
    if unknown := set((tied or {}).values()) - there:
        raise ConfigurationError(
            f"tied names {sorted(unknown)}: no array of the model is called so in torch; there are "
            f"{', '.join(sorted(there))}"
        )
    return names


def _in_torch(module: nnx.Module, attribute: str, ndim: int) -> tuple[str, tuple[int, ...]]:
    as_it_is = tuple(range(ndim))
    if attribute == "kernel" and isinstance(module, nnx.Linear | nnx.Conv):
        return "weight", (ndim - 1, ndim - 2, *range(ndim - 2))
    if attribute == "embedding" and isinstance(module, nnx.Embed):
        return "weight", as_it_is
    if isinstance(module, _NORMS):
        others = {"scale": "weight", "mean": "running_mean", "var": "running_var"}
        return others.get(attribute, attribute), as_it_is
    return attribute, as_it_is


def _dotted(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))


def torch_layout(
    state: Any,
    torch_names: Mapping[str, StoredAs],
    groups: Callable[[str, tuple[int, ...]], int] = lambda name, shape: 0,
) -> tuple[dict[str, StoredAs], dict[str, Any]]:
    """``names`` and ``about`` with which ``state`` is what the torch engine stores, and reads.

    ``torch_names`` maps paths of parameters to what `fullshard.jax.torch_names` gives. A leaf whose
    path ends with such a path is that parameter; behind ``mu`` or ``nu`` (of optax's Adam) it is
    its first or second moment, which torch calls exp_avg and exp_avg_sq; a ``count`` beside them is
    torch's ``step`` of every parameter. All other leaves are optional when loading, and integers
    among them that count steps become the checkpoint's step. ``groups`` says in which group of the
    torch optimizer a parameter is, by name and shape there.
    """
    names: dict[str, StoredAs] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    counts: list[str] = []
    for path, value in jax.tree.leaves_with_path(state):
        texts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        full = ".".join(texts)
        place = next((k for k in range(len(texts)) if ".".join(texts[k:]) in torch_names), None)
        if place is None and texts[-1] == "count":
            counts.append(full)
        elif place is None:
            names[full] = StoredAs(f"jax/{full}", optional=True, is_step=texts[-1] == "step")
        else:
            there = torch_names[".".join(texts[place:])]
            kind = {"mu": "exp_avg", "nu": "exp_avg_sq"}.get(texts[place - 1] if place else "")
            name, axes = f"model/{there.name}", there.axes or tuple(range(len(value.shape)))
            if kind:
                names[full] = StoredAs(f"optimizer/{kind}/{name}", axes)
            else:
                aliases = tuple(f"model/{each}" for each in there.aliases)
                names[full] = StoredAs(name, axes, aliases=aliases)
                shapes[name] = tuple(value.shape[axis] for axis in axes)
    steps = tuple(f"optimizer/step/{name}" for name in shapes)
    for full in counts:
        names[full] = StoredAs(steps[0], also=steps[1:], dtype="float32")
    in_groups: dict[int, list[str]] = {}
    for name, shape in shapes.items():
        in_groups.setdefault(groups(name, shape), []).append(name)
    listed = [{"params": in_groups[number]} for number in sorted(in_groups)]
    optimizer = {"class": "AdamW", "groups": listed, "values": {}}
    parts = {"model": "weights", "optimizer": "optimizer"}
    return names, {"parts": parts, "optimizers": {"optimizer": optimizer}, "values": {}}
