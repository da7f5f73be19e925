# SPDX-License-Identifier: Apache-2.0
"""Rules for what has one answer for all ranks: norms, sums, extremes, statistics, truth values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fullshard.torch.tensor.elementwise import (
    arguments_of,
    count_change,
    leading_ownership,
    need_whole,
    on_spans,
    refused,
)
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import Args, Kwargs, Rule, ShardedParameter
from fullshard.torch.tensor.reductions import (
    global_extreme,
    global_norms,
    global_statistic,
    global_sum,
    global_truth,
    unscale,
)

_aten = torch.ops.aten


def foreach_norm(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Take the norms of a list of tensors in one all-reduce."""
    given = {**dict(zip(("self", "ord", "dtype"), args, strict=False)), **kwargs}
    return global_norms(_parts(given["self"]), float(given.get("ord", 2)), given.get("dtype"))


def _parts(tensors: list[Any]) -> list[tuple[Tensor, Ownership | None]]:
    return [
        (x.local, x.ownership) if isinstance(x, ShardedParameter) else (x, None) for x in tensors
    ]


def _norm(func: OpOverload) -> Rule:
    by_name = arguments_of(func)

    def rule(args: Args, kwargs: Kwargs) -> Tensor:
        given = by_name(args, kwargs)
        order = given.get("ord", given.get("p", 2))
        owner = _of_all_dims(func, given, args, kwargs)
        order = 2.0 if order is None else float(order)
        return global_norms([(given["self"].local, owner)], order, given.get("dtype"))[0]

    return rule


def _of_all_dims(func: OpOverload, given: dict[str, Any], args: Args, kwargs: Kwargs) -> Ownership:
    """Return where the operand is; refuse what is not over all of its dimensions, to one number."""
    owner, rank = leading_ownership(func, args, kwargs), given["self"].dim()
    dims = given.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims or range(rank)
    whole = {dim % max(1, rank) for dim in dims} == set(range(rank))
    if not whole or given.get("keepdim") or "out" in given:
        need_whole(func, owner)
    return owner


def _truth(func: OpOverload) -> Rule:
    if func._overloadname != "default":
        return refused(func)
    every = func.overloadpacket is _aten.all

    def rule(args: Args, kwargs: Kwargs) -> Tensor:
        return global_truth(args[0].local, args[0].ownership, every=every)

    return rule


def _equal(func: OpOverload) -> Rule:
    """``torch.equal`` and ``torch.allclose``: one answer for all ranks."""
    exactly = func.overloadpacket is _aten.equal
    compare = on_spans(_aten.eq.Tensor if exactly else _aten.isclose.default)

    def rule(args: Args, kwargs: Kwargs) -> bool:
        one, other = args[:2]
        if exactly and one.shape != other.shape:
            return False
        sharded = isinstance(one, ShardedParameter) and isinstance(other, ShardedParameter)
        if sharded and one.shape == other.shape and not one.ownership.agrees_with(other.ownership):
            other = other.full_tensor()
        alike = compare((one, other, *args[2:]), kwargs)
        return bool(global_truth(alike.local, alike.ownership, every=True))

    return rule


def _sum(func: OpOverload) -> Rule:
    if func._overloadname != "default":
        return refused(func)
    mean = func.overloadpacket is _aten.mean

    def rule(args: Args, kwargs: Kwargs) -> Tensor:
        local, owner = args[0].local, args[0].ownership
        if not mean:
            return global_sum(local, owner, kwargs.get("dtype"))
        dtype = func(local.new_zeros(1), **kwargs).dtype  # torch's error for a mean of integers
        wide = torch.complex128 if dtype.is_complex else torch.float64
        average: Tensor = (global_sum(local, owner, wide) / owner.numel).to(dtype)
        return average

    return rule


_NONE, _MEAN = 0, 1  # torch's numbers of reductions; 2 is the sum


def _loss(func: OpOverload) -> Rule:
    """Run a loss between tensors cut alike, or its gradient: elementwise, then reduced by all.

    A mean of means, which DTensor takes, is another number where ranks hold unequal parts.
    """
    if func._overloadname != "default":
        return refused(func)
    elementwise, total, mean = on_spans(func), _sum(_aten.sum.default), _sum(_aten.mean.default)
    by_name, names = arguments_of(func), [argument.name for argument in func._schema.arguments]
    position, is_gradient = names.index("reduction"), names[0] == "grad_output"

    def rule(args: Args, kwargs: Kwargs) -> Any:
        reduction = by_name(args, kwargs).get("reduction", _MEAN)
        if len(args) > position:
            args = (*args[:position], _NONE, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "reduction": _NONE}
        if is_gradient and reduction == _MEAN:
            args = (args[0] / leading_ownership(func, args, kwargs).numel, *args[1:])
        result = elementwise(args, kwargs)
        if is_gradient or reduction == _NONE:
            return result
        reduced: Tensor = (mean if reduction == _MEAN else total)((result,), {})
        return reduced

    return rule


def _extreme(func: OpOverload) -> Rule:
    """Take the extreme over all dimensions; over some of them it is not this rank's."""
    largest, by_name = func.overloadpacket in (_aten.max, _aten.amax), arguments_of(func)
    if func._overloadname not in ("default", "out"):
        # Of two tensors it is elementwise.
        return on_spans(func) if func._overloadname == "other" else refused(func)

    def rule(args: Args, kwargs: Kwargs) -> Tensor:
        given = by_name(args, kwargs)
        owner = _of_all_dims(func, given, args, kwargs)
        return global_extreme(given["self"].local, owner, largest=largest)

    return rule


def _statistic(func: OpOverload) -> Rule:
    """Take ``std``, ``median`` and the like of the whole parameter, gathered for the moment."""

    def rule(args: Args, kwargs: Kwargs) -> Tensor:
        owner = leading_ownership(func, args, kwargs)
        answer = func(torch.empty(owner.shape, device="meta"), *args[1:], **kwargs)
        # Of rows it is DTensor's, as code for FSDP2 expects.
        if owner.placed is not None or not isinstance(answer, Tensor) or answer.dim():
            need_whole(func, owner)
        return global_statistic(args[0].local, owner, lambda x: func(x, *args[1:], **kwargs))

    return rule


def _unscale(func: OpOverload) -> Rule:
    """Unscale gradients as `torch.amp.GradScaler` does."""
    if func._overloadname != "default":
        return refused(func)

    def rule(args: Args, kwargs: Kwargs) -> None:
        grads, found_inf, inv_scale = args
        unscale(_parts(grads), found_inf, inv_scale)
        count_change(*(grad.local for grad in grads if isinstance(grad, ShardedParameter)))

    return rule


RULES_OF_ALL: dict[Any, Callable[[OpOverload], Rule]] = {
    **dict.fromkeys((_aten.linalg_vector_norm, _aten.norm), _norm),
    **dict.fromkeys((_aten.any, _aten.all), _truth),
    **dict.fromkeys((_aten.equal, _aten.allclose), _equal),
    **dict.fromkeys((_aten.sum, _aten.mean), _sum),
    **dict.fromkeys(
        (
            loss
            for name in (
                *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
                *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
            )
            for loss in (getattr(_aten, name), getattr(_aten, f"{name}_backward", None))
            if loss is not None
        ),
        _loss,
    ),
    **dict.fromkeys((_aten.max, _aten.min, _aten.amax, _aten.amin), _extreme),
    **dict.fromkeys(
        (_aten.std, _aten.var, _aten.median, _aten.argmax, _aten.argmin, _aten.prod), _statistic
    ),
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
"""By operation, what finds the rule of each of its overloads."""
