# SPDX-License-Identifier: Apache-2.0
"""Operations that treat every element by itself, run on this rank's spans of sharded tensors.

The optimizers are made of those. Beside sharded operands, which must all be cut alike, there may be
numbers, 0-dim tensors, and plain tensors of the global shape, of which the span is taken. Other
shapes are refused, also where torch would broadcast them.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from fullshard.core.errors import UnshardedOperationError
from fullshard.torch.tensor.ownership import Ownership

__all__ = [
    "Args",
    "Kwargs",
    "Rule",
    "count_change",
    "need_whole",
    "on_lists",
    "on_spans",
    "owner_of",
    "refused",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Any, Args, Kwargs], Any]
"""Carries one operation out. The first argument is the class of sharded tensors, which has
``value(local, ownership)``, and whose instances have ``local`` and ``ownership``."""


def count_change(*changed: Tensor) -> None:
    """Count a change of tensors that were written to below autograd, where torch does not count.

    The local tensors are views of a buffer, and whoever looks at its version must see the change.
    """
    torch._C._increment_version(changed)


def _written(func: OpOverload) -> list[str | int]:
    """Which arguments ``func`` writes to: positions, and names of keyword-only ones."""
    written: list[str | int] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    return written


def _binding(func: OpOverload) -> Callable[..., Any]:
    """What torch offers in Python for ``func``, which reads its arguments faster."""
    name = func.overloadpacket.__name__
    if name.startswith(("_foreach_", "_fused_")) or func._overloadname in ("default", "Tensor"):
        for home in (torch._C._VariableFunctions, torch._C.TensorBase):
            if hasattr(home, name):
                return cast(Callable[..., Any], getattr(home, name))
    return func


# ---- on the spans -------------------------------------------------------------------------------


def on_spans(func: OpOverload, drop: tuple[str, ...] = ()) -> Rule:
    """Run on the local tensors; without the arguments ``drop``, which mean nothing in one dim."""
    written = _written(func)
    if written not in ([], [0]):
        return _into(func, written[0]) if len(written) == 1 else refused(func)

    run = _binding(func)

    def rule(cls: Any, args: Args, kwargs: Kwargs) -> Any:
        # The hot path of optimizers in their for-loop form: the first operand nearly always leads.
        target = args[0]
        owner = target.ownership if type(target) is cls else owner_of(cls, func, args, kwargs)
        local_args = [
            arg.local
            if type(arg) is cls and arg.ownership is owner
            else _local(cls, func, owner, arg)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        if kwargs:
            kwargs = {
                key: _local(cls, func, owner, value)
                for key, value in kwargs.items()
                if key not in drop
            }
        if not written:
            result = run(*local_args, **kwargs)
            if isinstance(result, Tensor):
                return cls.value(result, owner)
            return tuple(cls.value(each, owner) for each in result)
        if type(target) is not cls:
            _refuse_to_write(func, owner)
        run(*local_args, **kwargs)
        count_change(target.local)
        return target

    return rule


def _into(func: OpOverload, key: str | int) -> Rule:
    """Run on the local tensors, writing to the argument ``key``, usually ``out``."""

    def rule(cls: Any, args: Args, kwargs: Kwargs) -> Any:
        owner = owner_of(cls, func, args, kwargs)
        target = args[key] if isinstance(key, int) else kwargs[key]
        if type(target) is not cls:
            _refuse_to_write(func, owner)
        local_args = [_local(cls, func, owner, arg) for arg in args]
        func(*local_args, **{k: _local(cls, func, owner, v) for k, v in kwargs.items()})
        count_change(target.local)
        return target

    return rule


def owner_of(cls: Any, func: OpOverload, args: Args, kwargs: Kwargs) -> Ownership:
    """The ownership of the first sharded operand that is not inside a list."""
    for arg in args:
        if type(arg) is cls:
            return cast(Ownership, arg.ownership)
    for arg in kwargs.values():
        if type(arg) is cls:
            return cast(Ownership, arg.ownership)
    # sharded tensors only inside a list, as in torch.stack
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    need_whole(func, next(x.ownership for each in lists for x in each if type(x) is cls))


def _local(cls: Any, func: OpOverload, owner: Ownership, arg: Any) -> Any:
    """What stands for ``arg`` when ``func`` runs on the spans of ``owner``."""
    if type(arg) is cls:
        if arg.ownership is not owner and not owner.agrees_with(arg.ownership):
            raise UnshardedOperationError(
                f"{func}: operands are not cut alike: {owner}; and {arg.ownership}. "
                "Use .full_tensor() of the one that is read"
            )
        return arg.local
    if not isinstance(arg, Tensor):
        return arg
    if arg.dim() == 0:
        return arg.full_tensor() if isinstance(arg, DTensor) else arg
    if arg.shape == owner.shape:
        return owner.cut(arg)
    raise UnshardedOperationError(
        f"{func}: an operand of shape {tuple(arg.shape)} does not fit {owner}; it must be a "
        "number, a 0-dim tensor, or of the same global shape (expand it first: it is not broadcast)"
    )


# ---- on lists: _foreach_* and _fused_* ----------------------------------------------------------


def on_lists(func: OpOverload) -> Rule:
    """The rule for ``_foreach_*`` and ``_fused_*`` operations, place by place of their lists.

    A place may also hold plain tensors alone (a parameter that is not sharded).
    """
    written = {key for key in _written(func) if isinstance(key, int)}
    run = _binding(func)

    def rule(cls: Any, args: Args, kwargs: Kwargs) -> Any:
        owners = _owners(cls, args)
        local_args = [
            _locals(cls, func, owners, arg, i in written) if isinstance(arg, list) else arg
            for i, arg in enumerate(args)
        ]
        if kwargs:
            kwargs = {
                key: _locals(cls, func, owners, value, False) if isinstance(value, list) else value
                for key, value in kwargs.items()
            }
        result = run(*local_args, **kwargs)
        if written:
            # The first list: nobody asks for the versions of gradients and state in fused forms.
            count_change(*local_args[0])
            return None
        return [
            each if owner is None else cls.value(each, owner)
            for each, owner in zip(result, owners, strict=True)
        ]

    return rule


def _owners(cls: Any, args: Args) -> list[Ownership | None]:
    """For each place of the lists the ownership of what is sharded there, None if nothing is."""
    try:
        return [each.ownership for each in args[0]]  # the hot path: all of the first are sharded
    except (AttributeError, TypeError):  # plain tensors among them, or a number comes first
        places = next(len(arg) for arg in args if isinstance(arg, list))
        lists = [arg for arg in args if isinstance(arg, list) and len(arg) == places]
        return [
            next((each.ownership for each in place if type(each) is cls), None)
            for place in zip(*lists, strict=True)
        ]


def _locals(
    cls: Any, func: OpOverload, owners: list[Ownership | None], items: list[Any], written: bool
) -> list[Any]:
    """What stands for a list when ``func`` runs on the spans of ``owners``, place by place."""
    try:
        # Lists compare their items by identity first, which is all that happens as a rule.
        if [item.ownership for item in items] == owners:
            return [item.local for item in items]
    except AttributeError:  # plain tensors (a step count) or numbers among them
        pass
    if len(items) != len(owners):
        return items
    counts = func.overloadpacket.__name__.startswith("_fused_")  # which write to step counts
    for item, owner in zip(items, owners, strict=True):
        if written and owner is not None and type(item) is not cls and (item.dim() or not counts):
            _refuse_to_write(func, owner)
    return [
        item if owner is None else _local(cls, func, owner, item)
        for item, owner in zip(items, owners, strict=True)
    ]


# ---- refusals -----------------------------------------------------------------------------------


def need_whole(func: OpOverload, owner: Ownership) -> NoReturn:
    """Raise `UnshardedOperationError`: ``func`` needs elements that other ranks hold."""
    raise UnshardedOperationError(
        f"{func} needs the whole of {owner}. Call .full_tensor() (on every rank), work on .local "
        "if one span at a time is meant, or do it in forward, where the unit's parameters are full "
        "(register_fsdp_forward_method makes them so in another method, as generate)"
    )


def _refuse_to_write(func: OpOverload, owner: Ownership) -> NoReturn:
    raise UnshardedOperationError(
        f"{func} would write one rank's span into a plain tensor: {owner}. "
        "Use .full_tensor() (on every rank) as the source"
    )


def refused(func: OpOverload) -> Rule:
    """The rule for what cannot be done on spans."""

    def rule(cls: Any, args: Args, kwargs: Kwargs) -> Any:
        need_whole(func, owner_of(cls, func, args, kwargs))

    return rule
