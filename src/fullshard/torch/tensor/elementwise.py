# SPDX-License-Identifier: Apache-2.0
"""Rules for elementwise operations: they run on this rank's spans of sharded tensors.

Optimizers consist of such operations. All sharded operands must be cut alike. Other operands may be
numbers, 0-dim tensors, or plain tensors of the global shape, whose span is used. Every other shape
is refused, even where torch would broadcast it.
"""

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from fullshard.core.errors import UnshardedOperationError
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import Args, Kwargs, Rule, ShardedParameter, written_by


def count_change(*changed: Tensor) -> None:
    """Raise the version of tensors that were written below autograd, where torch does not do so.

    The local tensors are views of a buffer; whoever watches its version must see the change.
    """
    torch._C._increment_version(changed)


def arguments_of(func: OpOverload) -> Callable[[Args, Kwargs], dict[str, Any]]:
    """Return what names the arguments of a call of ``func``; those left out are not there."""
    names = [argument.name for argument in func._schema.arguments]
    return lambda args, kwargs: {**dict(zip(names, args, strict=False)), **kwargs}


def _binding(func: OpOverload) -> Callable[..., Any]:
    """Return the Python binding of ``func``, which parses arguments faster than the overload."""
    name = func.overloadpacket.__name__
    if name.startswith(("_foreach_", "_fused_")) or func._overloadname in ("default", "Tensor"):
        for home in (torch._C._VariableFunctions, torch._C.TensorBase):
            if hasattr(home, name):
                return cast(Callable[..., Any], getattr(home, name))
    return func


# ---- on the spans -------------------------------------------------------------------------------


def on_spans(func: OpOverload, drop: tuple[str, ...] = ()) -> Rule:
    """Run ``func`` on the local tensors, without the arguments ``drop``, meaningless in one dim."""
    written = written_by(func)
    if written not in ([], [0]):
        return _into(func, written[0]) if len(written) == 1 else refused(func)

    run = _binding(func)

    def rule(args: Args, kwargs: Kwargs) -> Any:
        # The hot path of optimizers in their for-loop form: the first operand nearly always leads.
        target = args[0]
        owner = (
            target.ownership
            if isinstance(target, ShardedParameter)
            else leading_ownership(func, args, kwargs)
        )
        local_args = [
            arg.local
            if isinstance(arg, ShardedParameter) and arg.ownership is owner
            else _local(func, owner, arg)
            if isinstance(arg, Tensor)
            else arg
            for arg in args
        ]
        if kwargs:
            kwargs = {
                key: _local(func, owner, value) for key, value in kwargs.items() if key not in drop
            }
        if not written:
            result = run(*local_args, **kwargs)
            if isinstance(result, Tensor):
                return ShardedParameter.value(result, owner)
            return tuple(ShardedParameter.value(each, owner) for each in result)
        if not isinstance(target, ShardedParameter):
            _refuse_to_write(func, owner)
        run(*local_args, **kwargs)
        count_change(target.local)
        return target

    return rule


def _into(func: OpOverload, key: str | int) -> Rule:
    """Run ``func`` on the local tensors and write to the argument ``key``, usually ``out``."""

    def rule(args: Args, kwargs: Kwargs) -> Any:
        owner = leading_ownership(func, args, kwargs)
        target = args[key] if isinstance(key, int) else kwargs[key]
        if not isinstance(target, ShardedParameter):
            _refuse_to_write(func, owner)
        local_args = [_local(func, owner, arg) for arg in args]
        func(*local_args, **{k: _local(func, owner, v) for k, v in kwargs.items()})
        count_change(target.local)
        return target

    return rule


def leading_ownership(func: OpOverload, args: Args, kwargs: Kwargs) -> Ownership:
    """Return the ownership of the first sharded operand outside of lists; refuse without one."""
    for arg in args:
        if isinstance(arg, ShardedParameter):
            return arg.ownership
    for arg in kwargs.values():
        if isinstance(arg, ShardedParameter):
            return arg.ownership
    # All sharded tensors are inside lists, as in torch.stack.
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    need_whole(
        func, next(x.ownership for each in lists for x in each if isinstance(x, ShardedParameter))
    )


def _local(func: OpOverload, owner: Ownership, arg: Any) -> Any:
    """Return the operand to use for ``arg`` when ``func`` runs on the spans of ``owner``."""
    if isinstance(arg, ShardedParameter):
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
        if isinstance(arg, DTensor) and type(arg._local_tensor) is not Tensor:
            need_whole(func, owner)  # nobody knows if such elements can be flattened
        return owner.cut(arg)
    raise UnshardedOperationError(
        f"{func}: an operand of shape {tuple(arg.shape)} does not fit {owner}; it must be a "
        "number, a 0-dim tensor, or of the same global shape (expand it first: it is not broadcast)"
    )


# ---- on lists: _foreach_* and _fused_* ----------------------------------------------------------


def on_lists(func: OpOverload) -> Rule:
    """Run ``_foreach_*`` and ``_fused_*`` operations on the local tensors of their lists.

    A place of the lists may hold plain tensors alone (those of a parameter that is not sharded).
    """
    written = {key for key in written_by(func) if isinstance(key, int)}
    run = _binding(func)

    def rule(args: Args, kwargs: Kwargs) -> Any:
        owners = _owners(args)
        local_args = [
            _locals(func, owners, arg, i in written) if isinstance(arg, list) else arg
            for i, arg in enumerate(args)
        ]
        if kwargs:
            kwargs = {
                key: _locals(func, owners, value, False) if isinstance(value, list) else value
                for key, value in kwargs.items()
            }
        result = run(*local_args, **kwargs)
        if written:
            # The first list: nobody asks for the versions of gradients and state in fused forms.
            count_change(*local_args[0])
            return None
        return [
            each if owner is None else ShardedParameter.value(each, owner)
            for each, owner in zip(result, owners, strict=True)
        ]

    return rule


def _owners(args: Args) -> list[Ownership | None]:
    """Return the ownership at each place of the lists, or None where nothing is sharded."""
    try:
        return [each.ownership for each in args[0]]  # the hot path: all of the first are sharded
    except (AttributeError, TypeError):  # plain tensors among them, or a number comes first
        places = next(len(arg) for arg in args if isinstance(arg, list))
        lists = [arg for arg in args if isinstance(arg, list) and len(arg) == places]
        return [
            next((each.ownership for each in place if isinstance(each, ShardedParameter)), None)
            for place in zip(*lists, strict=True)
        ]


def _locals(
    func: OpOverload, owners: list[Ownership | None], items: list[Any], written: bool
) -> list[Any]:
    """Return the list to use for ``items`` when ``func`` runs on the spans of ``owners``."""
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
        if (
            written
            and owner is not None
            and not isinstance(item, ShardedParameter)
            and (item.dim() or not counts)
        ):
            _refuse_to_write(func, owner)
    return [
        item if owner is None else _local(func, owner, item)
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
    """Refuse ``func``, which cannot run on spans."""

    def rule(args: Args, kwargs: Kwargs) -> Any:
        need_whole(func, leading_ownership(func, args, kwargs))

    return rule
