# SPDX-License-Identifier: Apache-2.0
"""The rule by which each torch operation runs on sharded parameters, decided once per operation.

Elementwise operations run on the spans. Norms, sums, extremes and truth values are global. Random
fills draw the full tensor and keep the span, so that values and generator are those of one process;
for a moment this takes the memory of the full tensor. A new shape of the same elements keeps the
span, and rows are cut out of it. Everything else is refused, because it would silently compute on
one shard.

Importing this module makes the rules known to `ShardedParameter`; `fullshard.torch.tensor` does so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fullshard.core.layout import Span
from fullshard.torch.tensor.elementwise import (
    arguments_of,
    count_change,
    leading_ownership,
    need_whole,
    on_lists,
    on_spans,
    refused,
)
from fullshard.torch.tensor.global_rules import RULES_OF_ALL, foreach_norm
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import RULES, Args, Kwargs, Rule, ShardedParameter
from fullshard.torch.tensor.views import note_view

_aten = torch.ops.aten


@RULES.decided_by
def _decide(func: OpOverload) -> Rule:
    packet = func.overloadpacket
    name = packet.__name__
    if name.startswith("_foreach_"):
        base = name.removeprefix("_foreach_").removesuffix("_")
        if name == "_foreach_norm":
            return foreach_norm
        return on_lists(func) if _elementwise_name(base) else refused(func)
    if name.startswith("_fused_") and name.endswith("_"):
        return on_lists(func)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _draw(func) if name.endswith(("_", "_like")) else refused(func)
    if packet in _BY_PACKET:
        return _BY_PACKET[packet](func)
    if torch.Tag.pointwise in func.tags:
        return on_spans(func)
    return refused(func)


def _elementwise_name(name: str) -> bool:
    packet = getattr(_aten, name, None)
    if packet is None:
        return False
    # Not just any overload: max of two tensors is elementwise, max of one is not.
    mains = (getattr(packet, overload, None) for overload in _MAIN_OVERLOADS)
    return packet in _SPAN_WISE or any(
        main is not None and torch.Tag.pointwise in main.tags for main in mains
    )


# ---- drawn in full, kept in part ----------------------------------------------------------------


def _draw(func: OpOverload) -> Rule:
    in_place = func.overloadpacket.__name__.endswith("_")

    def rule(args: Args, kwargs: Kwargs) -> Any:
        target = args[0]
        others = (*args[1:], *kwargs.values())
        if not isinstance(target, ShardedParameter) or any(
            isinstance(other, ShardedParameter) for other in others
        ):
            need_whole(func, leading_ownership(func, args, kwargs))
        owner = target.ownership
        full = torch.empty(owner.shape, dtype=target.dtype, device=target.device)
        drawn = owner.cut(func(full, *args[1:], **kwargs))
        if not in_place:
            return ShardedParameter.value(drawn.clone(), owner)
        target.local.copy_(drawn)
        count_change(target.local)
        return target

    return rule


def _eye(func: OpOverload) -> Rule:
    def rule(args: Args, kwargs: Kwargs) -> Any:
        out = kwargs["out"]
        rows, columns = (*args, args[0])[:2]
        if (rows, columns) != tuple(out.shape):
            need_whole(func, out.ownership)
        full = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        out.local.copy_(out.ownership.cut(func(*args, out=full)))
        count_change(out.local)
        return out

    return rule


# ---- shapes, and new tensors --------------------------------------------------------------------


def _view(viewed: ShardedParameter, local: Tensor, owner: Ownership) -> ShardedParameter:
    made = ShardedParameter.value(local, owner)
    note_view(made, viewed)
    return made


def _reshape(func: OpOverload) -> Rule:
    """Give the same elements, in the same order, another shape: the span stays the same."""
    if func._overloadname == "dtype":
        return refused(func)

    def rule(args: Args, kwargs: Kwargs) -> Any:
        owner = args[0].ownership
        shape = func(torch.empty(owner.shape, device="meta"), *args[1:], **kwargs).shape
        if shape == owner.shape:
            return _view(args[0], args[0].local, owner)
        _need_flat_spans(func, owner)
        reshaped = owner.reshaped(shape)
        if owner.placed is not None and reshaped.placed is None:
            need_whole(func, owner)  # ranks hold no whole rows of it; DTensor knows what to do
        return _view(args[0], args[0].local, reshaped)

    return rule


def _need_flat_spans(func: OpOverload, owner: Ownership) -> None:
    """Refuse views of parameters whose spans are those of a part, or in another order."""
    if owner.tensor_parallel is not None or owner.dim:
        need_whole(func, owner)


def _reinterpret(func: OpOverload) -> Rule:
    """View complex numbers as pairs of real ones, or back: spans double, or halve."""
    to_real = func.overloadpacket is _aten.view_as_real

    def rule(args: Args, kwargs: Kwargs) -> Any:
        local, owner = args[0].local, args[0].ownership
        _need_flat_spans(func, owner)
        if to_real:
            shape, local = (*owner.shape, 2), func(local).view(-1)
            spans = tuple(Span(2 * span.start, 2 * span.stop) for span in owner.spans)
        else:
            shape, local = owner.shape[:-1], func(local.view(-1, 2))
            spans = tuple(Span(span.start // 2, span.stop // 2) for span in owner.spans)
        return _view(args[0], local, replace(owner, shape=shape, spans=spans))

    return rule


def _rows(func: OpOverload) -> Rule:
    """Run ``x[i]`` and ``x[i:j]``: consecutive elements, of which each rank holds a span."""
    by_name = arguments_of(func)

    def rule(args: Args, kwargs: Kwargs) -> Any:
        given = by_name(args, kwargs)
        owner: Ownership = given["self"].ownership
        _need_flat_spans(func, owner)
        shape = func(torch.empty(owner.shape, device="meta"), *args[1:], **kwargs).shape
        if given.get("dim", 0) % len(owner.shape) or given.get("step", 1) != 1:
            need_whole(func, owner)
        rows = owner.shape[0]
        first = given["index"] if "index" in given else given.get("start") or 0
        start = slice(first, None).indices(rows)[0] * (owner.numel // max(1, rows))
        part = _part(owner, start, shape)
        offset = max(0, start - owner.span.start)
        # What is written to the view is to count as a change of the buffer, as outside of dispatch.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            held = given["self"].local[offset : offset + part.span.numel]
        return _view(given["self"], held, part)

    return rule


def _part(owner: Ownership, start: int, shape: Sequence[int]) -> Ownership:
    """Return the ownership of the flat elements from ``start`` on that make up ``shape``."""
    numel = math.prod(shape)
    ends = (
        [min(max(end - start, 0), numel) for end in (span.start, span.stop)] for span in owner.spans
    )
    name = f"{owner.name}[{start}:{start + numel} of the flat elements]"
    spans = tuple(Span(*each) for each in ends)
    rows_on = owner.rows_on if owner.placed is None else owner.placed.mesh
    shape = tuple(shape)
    return replace(owner, name=name, shape=shape, spans=spans, placed=None, rows_on=rows_on)


def _new_values(func: OpOverload) -> Rule:
    """Make a plain tensor for ``new_empty(size)`` and its kin; a DTensor makes its like."""

    def rule(args: Args, kwargs: Kwargs) -> Any:
        value, size, *others = args
        owner: Ownership = value.ownership
        if owner.placed is None:
            return func(value.local, size, *others, **kwargs)
        if tuple(size) != owner.shape:
            need_whole(func, owner)
        local = func(value.local, [value.local.numel()], *others, **kwargs)
        return ShardedParameter.value(local, owner)

    return rule


def _empty_like(func: OpOverload) -> Rule:
    """Make memory like that of a value, filled with NaN if that was on the meta device.

    ``to_empty`` of a module inside a unit comes here, and the unit learns of it later: it must find
    what nobody initialises. See [Note: Memory that nobody has written].
    """
    make = _without_memory_format(func)

    def rule(args: Args, kwargs: Kwargs) -> Any:
        made = make(args, kwargs)
        if args[0].is_meta and not made.is_meta and made.is_floating_point():
            made.local.fill_(math.nan)
        return made

    return rule


def _pad(func: OpOverload) -> Rule:
    """Copy if nothing is to be added, as libraries ask for; refuse any other padding."""

    def rule(args: Args, kwargs: Kwargs) -> Any:
        if any(args[1]):
            need_whole(func, args[0].ownership)
        return ShardedParameter.value(args[0].local.clone(), args[0].ownership)

    return rule


def _alias(func: OpOverload) -> Rule:
    return lambda args, kwargs: _view(args[0], args[0].local, args[0].ownership)


def _index_put(func: OpOverload) -> Rule:
    """Run ``x[mask] = number`` with a mask that is cut as x is."""
    in_place = func.overloadpacket is _aten.index_put_

    def rule(args: Args, kwargs: Kwargs) -> Any:
        target, indices, value = args[:3]
        owner = leading_ownership(func, args, kwargs)
        mask: Any = indices[0] if len(indices) == 1 else None
        if not (
            isinstance(target, ShardedParameter)
            and isinstance(mask, ShardedParameter)
            and mask.dtype is torch.bool
            and owner.agrees_with(mask.ownership)
            and value.numel() == 1
            and not any(args[3:])
        ):
            need_whole(func, owner)
        result = func(target.local, [mask.local], value)
        if not in_place:
            return ShardedParameter.value(result, owner)
        count_change(target.local)
        return target

    return rule


# ---- the table -----------------------------------------------------------------------------------


def _without_memory_format(func: OpOverload) -> Rule:
    return on_spans(func, drop=("memory_format",))


_MAIN_OVERLOADS = ("default", "Tensor", "Scalar", "Tensor_Scalar")

_SPAN_WISE = {_aten.copy, _aten.zero, _aten.fill, _aten.clone}
"""Element by element, but not tagged so by torch (names without the underscore)."""

_BY_PACKET: dict[Any, Callable[[OpOverload], Rule]] = {
    **dict.fromkeys(
        (_aten.copy_, _aten.copy, _aten.zero_, _aten.fill_, _aten.fill, _aten.masked_fill_),
        on_spans,
    ),
    **dict.fromkeys(
        (_aten.clone, _aten._to_copy, _aten.zeros_like, _aten.ones_like, _aten.full_like),
        _without_memory_format,
    ),
    _aten.empty_like: _empty_like,
    **dict.fromkeys((_aten.detach, _aten.alias, _aten.lift_fresh), _alias),
    **dict.fromkeys(
        (_aten.view, _aten._unsafe_view, _aten.unsqueeze, _aten.squeeze, _aten._reshape_alias),
        _reshape,
    ),
    **dict.fromkeys((_aten.view_as_real, _aten.view_as_complex), _reinterpret),
    _aten.select: _rows,
    _aten.slice: _rows,
    _aten.constant_pad_nd: _pad,
    **dict.fromkeys(
        (_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full), _new_values
    ),
    **dict.fromkeys((_aten.index_put_, _aten.index_put), _index_put),
    **RULES_OF_ALL,
    _aten.eye: _eye,
}
