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

from collections.abc import Mapping
from dataclasses import dataclass

from flax import nnx

from fullshard.core.errors import ConfigurationError, NotSupportedError

__all__ = ["TorchName", "torch_names"]


@dataclass(frozen=True)
class TorchName:
    """An array's name in the torch model's state dict, and the others under which it is tied.

    ``axes`` are those of the array here, in the order in which torch has them.
    """

    name: str
    axes: tuple[int, ...]
    tied: tuple[str, ...] = ()


_NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.BatchNorm)
# Their arrays have no counterpart that is only turned or named otherwise.
_UNLIKE = (nnx.LinearGeneral, nnx.Einsum, nnx.ConvTranspose)


def torch_names(model: nnx.Module, tied: Mapping[str, str] | None = None) -> dict[str, TorchName]:
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
    names: dict[str, TorchName] = {}
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
            there = TorchName(name, axes, tuple(further.pop(name, ())))
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
