# SPDX-License-Identifier: Apache-2.0
"""The record of original parameters that sharded ones have replaced."""

import itertools
import sys
from traceback import walk_stack
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fullshard.core.errors import UsageError
from fullshard.torch.tensor.parameter import ShardedParameter

_MARK = "_fullshard_replaced_as"
_GUARD = "_fullshard_guard"  # the hook that stops gradients of what was replaced

_replacements = itertools.count(1)
_last_replacement = 0

Successor = tuple["ref[Any]", Tensor]
"""A parameter that was replaced, and what has taken its place."""


class _Replaced(nn.Parameter):
    """A parameter that a sharded one has replaced; it has the values from before sharding.

    It can be looked at and compared, but a forward that computes with it uses a stale reference.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute as with any parameter, unless a module's forward runs."""
        if _computes(func) and _in_forward():
            name = next((name for each in args if (name := _name_in(each))), "?")
            raise UsageError(
                f"forward uses a reference to parameter {name!r} that was taken before it was "
                "sharded (a closure, a tuple, another model that shares it): it has the first "
                "values, and nothing trains it. Use the module's attribute, which is full in "
                "forward, or an nn.ParameterList"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # the attributes that give values
_ABOUT = {"size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size"}
_ABOUT |= {"is_floating_point", "is_complex", "storage_offset", "__len__", "__hash__", "__repr__"}
_ABOUT |= {"register_hook", "requires_grad_", "__set__", "__delete__"}


def _computes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _VALUES
    return name not in _ABOUT


def _in_forward() -> bool:
    return any(frame.f_code is _CALL for frame, _ in walk_stack(sys._getframe(2)))


_CALL = nn.Module._call_impl.__code__


def _name_in(argument: Any) -> str | None:
    if isinstance(argument, (list, tuple)):
        return next((name for each in argument if (name := _name_in(each))), None)
    return name_of_replacement(argument)


def mark_replaced(original: Tensor, name: str) -> None:
    """Note on ``original`` that a sharded parameter has taken its place under ``name``.

    Optimizers that still hold it are refused when they step.
    """
    global _last_replacement
    setattr(original, _MARK, name)
    _last_replacement = next(_replacements)
    if type(original) is nn.Parameter:
        original.__class__ = _Replaced
    if original.is_leaf and original.requires_grad and not isinstance(original, ShardedParameter):

        def refuse(_grad: Tensor) -> None:
            raise UsageError(
                f"a gradient has come to the parameter that was sharded as {name!r}, which nothing "
                "trains any more: forward has used a reference to it that was taken before "
                "sharding (a list of weights, a closure, an alias). Use the module's attribute, "
                "which is full in forward, or an nn.ParameterList"
            )

        setattr(original, _GUARD, original.register_hook(refuse))  # type: ignore[no-untyped-call]


def put_back(original: Tensor) -> None:
    """Let ``original`` be a parameter as others again."""
    if type(original) is _Replaced:
        setattr(original, "__class__", nn.Parameter)  # noqa: B010 - mypy takes it for narrowed
    guard = original.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


def take_over_hooks(original: Tensor, sharded: Tensor) -> None:
    """Let the hooks that users have registered for the gradient of ``original`` get the sharded."""
    if original.is_meta and isinstance(original, ShardedParameter):
        return
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(original, kind, None)
        if hooks and sharded.requires_grad:
            setattr(sharded, kind, hooks)
            setattr(original, kind, None)


def last_replacement() -> int:
    """Return the number of the latest replacement in this process; it only grows."""
    return _last_replacement


def name_of_replacement(param: Tensor | None) -> str | None:
    """Return the name given to `mark_replaced`, or None for a parameter never replaced."""
    return getattr(param, _MARK, None)
