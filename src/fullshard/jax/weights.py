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

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fullshard.checkpoint.ranks import agree
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.safetensors_format import (
    Entry,
    EntryPlace,
    FileWriter,
    SliceReader,
    entries_in,
    header_of,
    places_in,
)
from fullshard.jax.checkpoint import STORED_DTYPES, Leaf, Names, StoredAs, process_ranks
from fullshard.jax.state import TrainState
from fullshard.jax.step import TrainStep

__all__ = ["load_weights", "save_weights", "torch_layout", "torch_names"]


def save_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> None:
    """Write the parameters of ``state`` (and statistics, as of BatchNorm) to one safetensors file.

    With ``names``, as `fullshard.jax.torch_names` gives them, the file is what the torch model's
    ``load_state_dict`` wants, and only arrays with a name are in it; without, arrays are called by
    their paths here. One array is gathered at a time. The file appears at ``path`` when it is
    complete. With several processes all of them must call; process 0 writes.

    Raises:
        ConfigurationError: on all processes, if the file cannot be written or cannot hold a dtype.
    """
    target, leaves = Path(path), _leaves(step, names)
    writer = None
    if jax.process_index() == 0:
        writer = FileWriter(target, header_of(_entries(leaves)))
    try:
        for key, leaf in leaves.items():
            array = step.gather_array(state, key)
            if writer is not None:
                raw = leaf.as_stored(array).reshape(-1).view(np.uint8).data
                for _ in (leaf.stored.name, *leaf.stored.aliases):
                    writer.append(raw)
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.abandon()
    failed = ConfigurationError(str(writer.failure)) if writer and writer.failure else None
    agree(process_ranks(), f"could not write the weights to {target}", failed)


def load_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> TrainState:
    """The ``state`` with the weights of one safetensors file; the state given is used up.

    The file is as `save_weights` writes it with the same ``names``, or as safetensors writes a
    torch model's ``state_dict()``; aliases of tied parameters may be missing. Any number of
    devices; an array is read where its turn comes. With several processes all of them must call,
    and all read the file.

    Raises:
        ConfigurationError: if the file cannot be read or does not fit: another array, shape or
            dtype, or tied parameters with different values. The state is as it was then.
    """
    source = Path(path)
    try:
        leaves = _leaves(step, names)
        there, known = entries_in(source), _entries(leaves)
        aliases = {alias for leaf in leaves.values() for alias in leaf.stored.aliases}
        wanted = {name: x for name, x in known.items() if name in there or name not in aliases}
        places = places_in(source, wanted)
        ties = [(alias, leaf.stored.name) for leaf in leaves.values()
                for alias in leaf.stored.aliases if alias in places]  # fmt: skip
        for alias, name in ties:
            if not np.array_equal(_raw(source, places[alias]), _raw(source, places[name])):
                raise ConfigurationError(
                    f"{alias!r} and {name!r} are one parameter in the model, and differ in the file"
                )
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"cannot load the weights in {source}: {error}") from error

    def arrays() -> Iterator[tuple[str, NDArray[Any]]]:
        for key, leaf in leaves.items():
            raw = _raw(source, places[leaf.stored.name])
            yield key, leaf.as_held(raw.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))

    return step.load_arrays(state, arrays())


def _leaves(step: TrainStep, names: Names | None) -> dict[str, Leaf]:
    """The contents of the file by key of the state, in the order of the file."""
    leaves: dict[str, Leaf] = {}
    for spec in step.specs:
        if spec.kind not in ("parameters", "other"):
            continue
        if spec.dtype not in STORED_DTYPES:
            raise ConfigurationError(f"{spec.path!r} is {spec.dtype}, which the format cannot hold")
        stored = StoredAs(spec.path) if names is None else names.get(spec.path)
        if stored is not None:
            shape = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))
            leaves[spec.key] = Leaf(spec.path, shape, stored)
        elif spec.kind == "parameters":
            raise ConfigurationError(f"no name is given for the parameter {spec.path!r}")
    return leaves


def _entries(leaves: Mapping[str, Leaf]) -> dict[str, Entry]:
    return {name: Entry(STORED_DTYPES[leaf.dtype], leaf.shape) for leaf in leaves.values()
            for name in (leaf.stored.name, *leaf.stored.aliases)}  # fmt: skip


def _raw(source: Path, place: EntryPlace) -> NDArray[np.uint8]:
    """The bytes of one entry."""
    raw = np.empty(place.entry.size_bytes, np.uint8)
    with SliceReader(source) as file:
        file.read_into(raw.data, place.start)
    return raw


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
    further: dict[str, list[str]] = {}
    for alias, name in (tied or {}).items():
        further.setdefault(name, []).append(alias)
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
            name, axes = _in_torch(module, attribute, variable.ndim)
            name = _dotted((*path, name))
            there = StoredAs(name, axes, aliases=tuple(further.pop(name, ())))
            names[_dotted((*path, attribute))] = there
    if further:
        raise ConfigurationError(
            f"tied names {sorted(further)}: no array of the model is called so in torch; there are "
            f"{', '.join(sorted(each.name for each in names.values()))}"
        )
    return names


def _in_torch(module: nnx.Module, attribute: str, ndim: int) -> tuple[str, tuple[int, ...]]:
    as_it_is = tuple(range(ndim))
    if isinstance(module, nnx.Linear) and attribute == "kernel":
        return "weight", (1, 0)
    if isinstance(module, nnx.Conv) and attribute == "kernel":
        return "weight", (ndim - 1, ndim - 2, *range(ndim - 2))
    if isinstance(module, nnx.Embed) and attribute == "embedding":
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
    shapes: dict[str, tuple[int, ...]] = {}
    names: dict[str, StoredAs] = {}
    counts: list[str] = []
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        texts = [jax.tree_util.keystr((key,), simple=True) for key in path]
        full = ".".join(texts)
        place = next((k for k in range(len(texts)) if ".".join(texts[k:]) in torch_names), None)
        if place is not None:
            there = torch_names[".".join(texts[place:])]
            kind = {"mu": "exp_avg", "nu": "exp_avg_sq"}.get(texts[place - 1] if place else "")
            name, axes = f"model/{there.name}", there.axes or tuple(range(len(value.shape)))
            if kind is None:
                aliases = tuple(f"model/{each}" for each in there.aliases)
                names[full] = StoredAs(name, axes, aliases=aliases)
                shapes[name] = tuple(value.shape[axis] for axis in axes)
            else:
                names[full] = StoredAs(f"optimizer/{kind}/{name}", axes)
        elif texts[-1] == "count":
            counts.append(full)
        else:
            is_step = texts[-1] == "step"
            names[full] = StoredAs(f"jax/{full}", optional=True, is_step=is_step)
    steps = [f"optimizer/step/{name}" for name in shapes]
    for full in counts:
        names[full] = StoredAs(steps[0], also=tuple(steps[1:]), dtype="float32")
    numbers = sorted({groups(name, shape) for name, shape in shapes.items()})
    listed = [
        {"params": [name for name, shape in shapes.items() if groups(name, shape) == number]}
        for number in numbers
    ]
    optimizer = {"class": "AdamW", "groups": listed, "values": {}}
    parts = {"model": "weights", "optimizer": "optimizer"}
    about = {"parts": parts, "optimizers": {"optimizer": optimizer}, "values": {}}
    return names, about
