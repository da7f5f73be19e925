# SPDX-License-Identifier: Apache-2.0
"""Names that match arrays of a Flax NNX model to a torch model's with the same modules.

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

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.jax.files.leaves import StoredAs

__all__ = ["torch_layout", "torch_names"]

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
