# SPDX-License-Identifier: Apache-2.0
"""What torch operations mean on a sharded parameter: a rule for each, decided once.

An operation that treats every element by itself may run on the spans: the optimizers are made of
those. Norms and truth values are global. Random fills draw the full tensor and keep the span, so that
values and generator are those of one process, at the price of the full tensor's memory for a moment.
Everything else would be shard-local maths in silence, and is refused.

Beside sharded operands there may be numbers, 0-dim tensors, and plain tensors of the global shape, of
which the span is taken. Other shapes are refused, also where torch would broadcast them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from fullshard.core.errors import UnshardedOperationError
from fullshard.torch.ownership import Ownership
from fullshard.torch.reductions import global_norms, global_truth

__all__ = ["RULES"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[type, Args, Kwargs], Any]
"""Carries one operation out, given the class of sharded tensors."""

_aten = torch.ops.aten
_increment_version = torch._C._increment_version


class _Rules(dict[OpOverload, Rule]):
    """The rule for each operation, decided when it is first asked for.

    Threads may decide the same at the same time; they decide alike.
    """

    def __missing__(self, func: OpOverload) -> Rule:
        rule = self[func] = _decide(func)
        return rule


RULES = _Rules()
"""How to carry out an operation of whose operands at least one is sharded. Rules raise
`UnshardedOperationError` for what needs more than this rank's span."""


def _decide(func: OpOverload) -> Rule:
    packet = func.overloadpacket
    name = packet.__name__
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_").removesuffix("_")
        if name == "_foreach_norm":
            return _foreach_norm
        return _on_lists(func) if _elementwise_name(base) else _refuse(func)
    if name.startswith("_fused_") and name.endswith("_"):
        return _on_lists(func)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _draw(func) if name.endswith(("_", "_like")) else _refuse(func)
    if packet in _BY_PACKET:
        return _BY_PACKET[packet](func)
    if torch.Tag.pointwise in func.tags:
        return _on_spans(func)
    return _refuse(func)


def _elementwise_name(name: str) -> bool:
    packet = getattr(_aten, name, None)
    if packet is None:
        return False
    return packet in _SPAN_WISE or any(
        torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
    )


def _written(func: OpOverload) -> list[str | int]:
    """Which arguments ``func`` writes to: positions, and names of keyword-only ones."""
    written: list[str | int] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    return written


# ---- on the spans -------------------------------------------------------------------------------


def _on_spans(func: OpOverload, drop: tuple[str, ...] = ()) -> Rule:
    """Run on the local tensors; without the arguments ``drop``, which mean nothing in one dim."""
    written = _written(func)
    if written not in ([], [0]):
        return _into(func, written[0]) if len(written) == 1 else _refuse(func)

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        # The hot path of optimizers in their for-loop form: the first operand nearly always leads.
        target = args[0]
        owner = target.ownership if type(target) is cls else _owner(cls, func, args, kwargs)
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
            return _wrapped(cls, func(*local_args, **kwargs), owner)
        if type(target) is not cls:
            _refuse_to_write(func, owner)
        func(*local_args, **kwargs)
        # Here, below autograd, torch does not count changes: whoever looks at the version of the
        # buffer behind the spans must still see that it has changed.
        _increment_version((target.local,))
        return target

    return rule


def _into(func: OpOverload, key: str | int) -> Rule:
    """Run on the local tensors, writing to the argument ``key``, usually ``out``."""

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        owner = _owner(cls, func, args, kwargs)
        target = args[key] if isinstance(key, int) else kwargs[key]
        if type(target) is not cls:
            _refuse_to_write(func, owner)
        local_args = [_local(cls, func, owner, arg) for arg in args]
        func(*local_args, **{k: _local(cls, func, owner, v) for k, v in kwargs.items()})
        _increment_version((target.local,))
        return target

    return rule


def _wrapped(cls: type, result: Any, owner: Ownership) -> Any:
    if isinstance(result, Tensor):
        return cls.value(result, owner)
    return tuple(cls.value(each, owner) for each in result)


def _owner(cls: type, func: OpOverload, args: Args, kwargs: Kwargs) -> Ownership:
    for arg in args:
        if type(arg) is cls:
            return arg.ownership
    for arg in kwargs.values():
        if type(arg) is cls:
            return arg.ownership
    # sharded tensors only inside a list, as in torch.stack
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    _fail(func, next(x.ownership for each in lists for x in each if type(x) is cls))


def _local(cls: type, func: OpOverload, owner: Ownership, arg: Any) -> Any:
    """What stands for ``arg`` when ``func`` runs on the spans of ``owner``."""
    if type(arg) is cls:
        if arg.ownership is not owner and not owner.agrees_with(arg.ownership):
            raise UnshardedOperationError(
                f"{func}: operands are not cut alike: {owner}; and {arg.ownership}. "
                "Use .full_tensor() of the one that is read"
            )
        return arg.local
    if not isinstance(arg, Tensor) or arg.dim() == 0:
        return arg
    if arg.shape == owner.shape:
        return owner.cut(arg)
    raise UnshardedOperationError(
        f"{func}: an operand of shape {tuple(arg.shape)} does not fit {owner}; it must be a number, "
        "a 0-dim tensor, or of the same global shape (expand it first: it is not broadcast)"
    )


# ---- on lists: _foreach_* and _fused_* ----------------------------------------------------------


def _on_lists(func: OpOverload) -> Rule:
    written = [key for key in _written(func) if isinstance(key, int)]

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        owners = _owners(cls, args)
        local_args = [
            _local_list(cls, func, owners, arg) if isinstance(arg, list) else arg for arg in args
        ]
        for key in written:
            _check_written(cls, func, owners, args[key])
        if kwargs:
            kwargs = {
                key: _local_list(cls, func, owners, value) if isinstance(value, list) else value
                for key, value in kwargs.items()
            }
        result = func(*local_args, **kwargs)
        for key in written:
            _increment_version(local_args[key])
        if written:
            return result
        return [
            each if owner is None else cls.value(each, owner)
            for each, owner in zip(result, owners, strict=True)
        ]

    return rule


def _owners(cls: type, args: Args) -> list[Ownership | None]:
    """For each place of the lists the ownership of what is sharded there, None if nothing is."""
    try:
        return [each.ownership for each in args[0]]  # the hot path: all of the first are sharded
    except AttributeError:
        columns = zip(*(a for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)))
        return [
            next((each.ownership for each in column if type(each) is cls), None)
            for column in columns
        ]


def _local_list(
    cls: type, func: OpOverload, owners: list[Ownership | None], items: list[Any]
) -> list[Any]:
    try:
        # Lists compare their items by identity first, which is all that happens as a rule.
        if [item.ownership for item in items] == owners:
            return [item.local for item in items]
    except AttributeError:  # plain tensors (a step count) or numbers among them
        pass
    if len(items) != len(owners):
        return items
    return [
        item if owner is None else _local(cls, func, owner, item)
        for item, owner in zip(items, owners, strict=True)
    ]


def _check_written(
    cls: type, func: OpOverload, owners: list[Ownership | None], items: list[Any]
) -> None:
    for owner, item in zip(owners, items, strict=False):
        if type(item) is not cls and owner is not None and item.dim() > 0:
            _refuse_to_write(func, owner)


# ---- global -------------------------------------------------------------------------------------


def _foreach_norm(cls: type, args: Args, kwargs: Kwargs) -> list[Tensor]:
    tensors, order, dtype = (*args, 2, None)[:3] if len(args) == 1 else (*args, None)[:3]
    parts = [(x.local, x.ownership) if type(x) is cls else (x, None) for x in tensors]
    return global_norms(parts, float(kwargs.get("ord", order)), kwargs.get("dtype", dtype))


def _norm(func: OpOverload) -> Rule:
    names = [argument.name for argument in func._schema.arguments]

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Tensor:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensor = given["self"]
        owner = _owner(cls, func, args, kwargs)
        dims = given.get("dim")
        whole = dims in (None, [], ()) or {d % max(1, tensor.dim()) for d in dims} == set(
            range(tensor.dim())
        )
        if not whole or given.get("keepdim") or "out" in given:
            _fail(func, owner)
        order = given.get("ord", given.get("p", 2))
        order = 2.0 if order is None else float(order)
        return global_norms([(tensor.local, owner)], order, given.get("dtype"))[0]

    return rule


def _truth(func: OpOverload) -> Rule:
    if func._overloadname != "default":
        return _refuse(func)
    every = func.overloadpacket is _aten.all

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Tensor:
        return global_truth(args[0].local, args[0].ownership, every=every)

    return rule


# ---- drawn in full, kept in part ----------------------------------------------------------------


def _draw(func: OpOverload) -> Rule:
    in_place = func.overloadpacket.__name__.endswith("_")

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        target = args[0]
        others = (*args[1:], *kwargs.values())
        if type(target) is not cls or any(type(other) is cls for other in others):
            _fail(func, _owner(cls, func, args, kwargs))
        owner = target.ownership
        full = torch.empty(owner.shape, dtype=target.dtype, device=target.device)
        drawn = owner.cut(func(full, *args[1:], **kwargs))
        if not in_place:
            return cls.value(drawn.clone(), owner)
        target.local.copy_(drawn)
        _increment_version((target.local,))
        return target

    return rule


def _eye(func: OpOverload) -> Rule:
    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        out = kwargs["out"]
        rows, columns = (*args, args[0])[:2]
        if (rows, columns) != tuple(out.shape):
            _fail(func, out.ownership)
        full = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        out.local.copy_(out.ownership.cut(func(*args, out=full)))
        _increment_version((out.local,))
        return out

    return rule


# ---- shapes, and new tensors --------------------------------------------------------------------


def _reshape(func: OpOverload) -> Rule:
    """Another shape of the same elements in the same order: the span stays what it is."""

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        owner = args[0].ownership
        shape = func(torch.empty(owner.shape, device="meta"), *args[1:], **kwargs).shape
        return cls.value(args[0].local, owner if shape == owner.shape else owner.reshaped(shape))

    return rule


def _alias(func: OpOverload) -> Rule:
    return lambda cls, args, kwargs: cls.value(args[0].local, args[0].ownership)


def _new_plain(func: OpOverload) -> Rule:
    """``new_empty(size)`` and its kin name a size of their own: a plain tensor of that size."""
    return lambda cls, args, kwargs: func(args[0].local, *args[1:], **kwargs)


def _index_put(func: OpOverload) -> Rule:
    """``x[mask] = number``, with a mask that is cut as x is."""
    in_place = func.overloadpacket is _aten.index_put_

    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        target, indices, value = args[:3]
        owner = _owner(cls, func, args, kwargs)
        mask = indices[0] if len(indices) == 1 else None
        plain_number = type(value) is not cls and value.numel() == 1
        if not (
            type(target) is cls is type(mask)
            and mask.dtype is torch.bool
            and plain_number
            and not any(args[3:])
        ):
            _fail(func, owner)
        local_mask = _local(cls, func, owner, mask)
        result = func(target.local, [local_mask], value)
        if not in_place:
            return cls.value(result, owner)
        _increment_version((target.local,))
        return target

    return rule


# ---- refusals -----------------------------------------------------------------------------------


def _fail(func: OpOverload, owner: Ownership) -> NoReturn:
    raise UnshardedOperationError(
        f"{func} needs the whole of {owner}. Call .full_tensor() (on every rank), work on .local if "
        "one span at a time is meant, or do it in forward, where the unit's parameters are full"
    )


def _refuse_to_write(func: OpOverload, owner: Ownership) -> NoReturn:
    raise UnshardedOperationError(
        f"{func} would write one rank's span into a plain tensor: {owner}. "
        "Use .full_tensor() (on every rank) as the source"
    )


def _refuse(func: OpOverload) -> Rule:
    def rule(cls: type, args: Args, kwargs: Kwargs) -> Any:
        _fail(func, _owner(cls, func, args, kwargs))

    return rule


def _without_memory_format(func: OpOverload) -> Rule:
    return _on_spans(func, drop=("memory_format",))


_SPAN_WISE = {_aten.copy, _aten.zero, _aten.fill, _aten.clone}
"""Element by element, but not tagged so by torch (names without the underscore)."""

_BY_PACKET: dict[Any, Callable[[OpOverload], Rule]] = {
    **dict.fromkeys((_aten.copy_, _aten.zero_, _aten.fill_, _aten.fill, _aten.copy), _on_spans),
    **dict.fromkeys(
        (
            _aten.clone,
            _aten._to_copy,
            _aten.empty_like,
            _aten.zeros_like,
            _aten.ones_like,
            _aten.full_like,
        ),
        _without_memory_format,
    ),
    **dict.fromkeys((_aten.detach, _aten.alias, _aten.lift_fresh), _alias),
    **dict.fromkeys(
        (_aten.view, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze, _aten._reshape_alias),
        _reshape,
    ),
    **dict.fromkeys(
        (_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full), _new_plain
    ),
    **dict.fromkeys((_aten.index_put_, _aten.index_put), _index_put),
    **dict.fromkeys((_aten.linalg_vector_norm, _aten.norm), _norm),
    **dict.fromkeys((_aten.any, _aten.all), _truth),
    _aten.eye: _eye,
}
