# SPDX-License-Identifier: Apache-2.0
"""The places of parameters in modules: where each is used, and how to swap it.

Outside of forward and backward a module shows its sharded parameters, inside its full ones.
Swapping writes to ``module._parameters`` directly: going through ``setattr`` costs more than
everything else that the engine does for a parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.torch.tensor.tensor_parallel import TensorParallel

WRAPPED = "_fsdp_wrapped_module"
"""The attribute under which FSDP1 wrappers keep the wrapped module; users see it in ``print``."""


_WRAPPING = {WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"}


@dataclass(frozen=True)
class ParamSites:
    """One parameter and every place where a module holds it (several if it is tied)."""

    spec: ParamSpec
    param: nn.Parameter
    sites: tuple[tuple[dict[str, Any], str], ...]
    tensor_parallel: TensorParallel | None = None
    module: nn.Module | None = None  # that holds it, for hooks of tensor classes

    def put(self, param: Tensor) -> None:
        """Let all modules show ``param`` in this parameter's place."""
        for parameters, key in self.sites:
            parameters[key] = param

    @property
    def shown(self) -> Any:
        """The value that the first of those modules shows in this parameter's place now."""
        parameters, key = self.sites[0]
        return parameters[key]

    @property
    def shown_everywhere(self) -> Any:
        """The value that all of those modules show in its place now; None if they differ."""
        shown = [parameters.get(key) for parameters, key in self.sites]
        return shown[0] if all(each is shown[0] for each in shown) else None

    def relative_to(self, path: str) -> "ParamSites":
        """Return the same parameter, named as the module at ``path`` names it."""
        start = len(path) + 1 if path else 0
        aliases = tuple(alias[start:] for alias in self.spec.aliases)
        return replace(self, spec=replace(self.spec, name=self.spec.name[start:], aliases=aliases))


Holder = tuple[list[Any] | dict[Any, Any], Any]
"""A list or dict beside ``module._parameters`` that holds a parameter, and the key in it."""

_HELD_DEPTH = 3


def holders_in(module: nn.Module) -> Iterator[tuple[Holder, nn.Parameter]]:
    """Yield the parameters in lists and dicts that are attributes of ``module``, nested or not."""
    for name, value in module.__dict__.items():
        if isinstance(value, (list, dict)) and name not in _REGISTRIES:
            yield from _held_in(value, _HELD_DEPTH)


_REGISTRIES = set(nn.Module().__dict__)  # of parameters, modules, hooks


def _held_in(
    container: list[Any] | dict[Any, Any], depth: int
) -> Iterator[tuple[Holder, nn.Parameter]]:
    items = enumerate(container) if isinstance(container, list) else container.items()
    for key, value in items:
        if isinstance(value, nn.Parameter):
            yield (container, key), value
        elif depth > 1 and isinstance(value, (list, dict)):
            yield from _held_in(value, depth - 1)


class Holders:
    """The lists and dicts of users that show what modules show of a unit's parameters."""

    def __init__(self) -> None:
        self.held: list[tuple[Holder, str]] = []  # and the parameter's name in the unit

    def follow(self, holder: Holder, name: str, value: Tensor) -> None:
        """Let a place show ``value`` now, and from now on what modules show of ``name``."""
        container, key = holder
        container[key] = value
        known = ((id(each), other) for (each, other), _ in self.held)
        if (id(container), key) not in known:
            self.held.append((holder, name))

    def show(self, values: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Show new values by name: the first, where one of the others is shown.

        What users have put in its place, and names that another unit has now, are left alone.
        """
        for (container, key), name in self.held:
            value, *ours = values.get(name, (None,))
            with suppress(LookupError):  # users may change their lists
                if any(container[key] is each for each in ours):
                    container[key] = value


def clean_name(name: str, *, compiled: bool = False) -> str:
    """Return a name as the plain model has it, without what wrappers of all kinds add.

    With ``compiled`` what `torch.compile` adds stays, as in PyTorch's names of parameters.
    """
    added = _WRAPPING - {"_orig_mod"} if compiled else _WRAPPING
    return ".".join(part for part in name.split(".") if part not in added)


def notes_on(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users have put on a parameter; not what holds its values."""
    flatten = getattr(param, "__tensor_flatten__", None)  # of a class that wraps others
    inner = [] if flatten is None else flatten()[0]
    return {k: v for k, v in param.__dict__.items() if "_fullshard" not in k and k not in inner}


def device_of(sites: Sequence[ParamSites]) -> torch.device | None:
    """Return the one device of all the parameters, or None if there are none.

    Raises `ConfigurationError` naming two parameters if they are on several devices.
    """
    first: ParamSites | None = None
    for each in sites:
        first = first or each
        if each.param.device != first.param.device:
            raise ConfigurationError(
                f"all parameters of a unit must be on one device, but {first.spec.name!r} is on "
                f"{first.param.device} and {each.spec.name!r} on {each.param.device}; move the "
                "module to one device before sharding it"
            )
    return first.param.device if first else None
