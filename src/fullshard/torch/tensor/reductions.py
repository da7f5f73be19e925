# SPDX-License-Identifier: Apache-2.0
"""Norms, sums, extremes, truth values of whole parameters, of which each rank sees one span.

[Note: Norms across ranks]
A p-norm is (sum of |x|^p)^(1/p). Each rank takes the norm of its span with torch's own kernel, and
the ranks add the p-th powers in fp64, so that nothing overflows which the norm itself would not.
All tensors of a call travel in one all-reduce per communicator (one that is cut along a tensor axis
too in one more, over that); its result, and so the norm, has
the same bits on every rank. Order 0 adds counts, inf and -inf take the extreme. The maximum of a
NaN and a number is not the same in every backend, so NaNs travel beside the extremes as flags.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.torch.comm.protocol import ReduceOp
from fullshard.torch.tensor.ownership import Ownership

__all__ = [
    "GlobalScalar",
    "global_extreme",
    "global_norms",
    "global_sum",
    "global_truth",
    "unscale",
]


class GlobalScalar(torch.Tensor):
    """A number that every rank has: a plain 0-dim tensor that also answers ``full_tensor()``.

    Small results (0-dim and 1-d) of torch functions on it are of the same type, so that the total
    norm which torch computes from the norms of parameters is one too.
    """

    def full_tensor(self) -> Tensor:
        """The same number as a plain tensor; nothing is communicated."""
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalScalar":
        """The same number in memory of its own."""
        made: GlobalScalar = copy.deepcopy(self.full_tensor(), memo).as_subclass(GlobalScalar)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a plain tensor, so that any reader can load it."""
        plain = self.full_tensor()
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; keep the type of small new tensors and leave all else as it comes."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if (
            type(result) is torch.Tensor
            and func is not torch.Tensor.as_subclass
            and result.dim() <= 1
            and not any(result is arg for arg in args)
        ):
            return result.as_subclass(cls)
        return result


def global_norms(
    parts: Sequence[tuple[Tensor, Ownership | None]],
    order: float,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The norm of order ``order`` of each whole tensor; see [Note: Norms across ranks].

    ``parts`` are (tensor, None) for what every rank has whole, and (span, ownership) otherwise.
    Returns 0-dim tensors of ``dtype``, by default the real dtype of each part. Collective over the
    communicators of the parts.
    """
    norms: list[Tensor | None] = [None] * len(parts)
    by_comms: dict[tuple[int, ...], list[int]] = {}
    for i, (tensor, ownership) in enumerate(parts):
        if ownership is None or all(comm.size == 1 for comm in ownership.comms):
            norms[i] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        else:
            by_comms.setdefault(tuple(map(id, ownership.comms)), []).append(i)
    for indices in by_comms.values():
        ownership = parts[indices[0]][1]
        assert ownership is not None
        locals_ = [parts[i][0] for i in indices]
        totals = _combine(_local_norms(locals_, order), order, ownership)
        wanted = [dtype or local.dtype.to_real() for local in locals_]
        cast = {each: totals.to(each).unbind() for each in set(wanted)}
        for place, (i, each) in enumerate(zip(indices, wanted, strict=True)):
            norms[i] = cast[each][place]
    return [norm.as_subclass(GlobalScalar) for norm in norms if norm is not None]


def _local_norms(locals_: Sequence[Tensor], order: float) -> Tensor:
    """The norms of the spans as one fp64 vector; an empty span gives what does not count."""
    nothing = math.inf if order == -math.inf or -math.inf < order < 0 else 0.0
    norms = [torch.full((), nothing, dtype=torch.float64, device=locals_[0].device)] * len(locals_)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, local in enumerate(locals_):
        if local.numel():
            by_dtype.setdefault(local.dtype, []).append(i)
    for dtype, indices in by_dtype.items():
        # low precision is rounded once, at the end
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else None
        taken = torch._foreach_norm([locals_[i] for i in indices], order, wide)
        for i, norm in zip(indices, taken, strict=True):
            norms[i] = norm
    return torch.stack(norms).double()


def _combine(norms: Tensor, order: float, ownership: Ownership) -> Tensor:
    if math.isinf(order):
        sign = math.copysign(1.0, order)
        extremes = torch.stack([norms.nan_to_num(math.inf, posinf=math.inf) * sign, norms.isnan()])
        for comm in ownership.comms:
            comm.all_reduce([extremes], "max").wait()
        return torch.where(extremes[1] > 0, math.nan, extremes[0] * sign)
    if order not in (0, 1):
        norms = norms.pow(order)
    for comm in ownership.comms:
        comm.all_reduce([norms]).wait()
    return norms if order in (0, 1) else norms.pow(1 / order)


def global_truth(local: Tensor, ownership: Ownership, *, every: bool) -> Tensor:
    """``all`` (``every``) or ``any`` over the whole parameter, as a 0-dim bool. Collective."""
    mine = local.all() if every else local.any()
    votes = mine.to(torch.int32).reshape(1)
    for comm in ownership.comms:
        comm.all_reduce([votes], "min" if every else "max").wait()
    return votes[0].bool().as_subclass(GlobalScalar)


def global_sum(local: Tensor, ownership: Ownership, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the whole parameter, 0-dim; of integers and truth values in int64. Collective.

    Added up in fp64, and so, when rounded to ``dtype``, closer than one process's sum.
    """
    if local.is_complex():
        total = torch.view_as_real(local).double().reshape(-1, 2).sum(0)
    else:
        total = local.sum(dtype=torch.float64 if local.is_floating_point() else torch.int64)
    for comm in ownership.comms:
        comm.all_reduce([total]).wait()
    if local.is_complex():
        total = torch.view_as_complex(total)
    counted = local.dtype if total.dtype != torch.int64 else torch.int64
    return total.to(dtype or counted).as_subclass(GlobalScalar)


def global_extreme(local: Tensor, ownership: Ownership, *, largest: bool) -> Tensor:
    """The largest or smallest element of the whole parameter, 0-dim; NaN if one is. Collective."""
    op: ReduceOp = "max" if largest else "min"
    floating = local.is_floating_point()
    wide = torch.float64 if floating else torch.int64
    info = torch.finfo(wide) if floating else torch.iinfo(wide)
    nothing = -math.inf if floating else info.min
    if not largest:
        nothing = math.inf if floating else info.max
    mine = torch.full((), nothing, dtype=wide, device=local.device)
    if local.numel():
        mine = (local.max() if largest else local.min()).to(wide)
    is_nan = mine.isnan().to(wide)
    mine = mine.nan_to_num(nothing, posinf=math.inf, neginf=-math.inf) if floating else mine
    for comm in ownership.comms:
        comm.all_reduce([mine], op).wait()
        comm.all_reduce([is_nan], "max").wait()
    if floating:
        mine = torch.where(is_nan > 0, math.nan, mine)
    return mine.to(local.dtype).as_subclass(GlobalScalar)


def unscale(
    parts: Sequence[tuple[Tensor, Ownership | None]], found_inf: Tensor, inv_scale: Tensor
) -> None:
    """Multiply gradients by ``inv_scale`` in place; ``found_inf`` becomes 1 if one is not finite.

    ``parts`` are as in `global_norms`, all of one dtype and device; the other two are 0-dim and
    float32. Collective over the communicators of the parts: ``found_inf``, with what it held
    before, ends as its maximum over their ranks.
    """
    if inv_scale.device.type == "cpu" and torch.cuda.is_available():
        # torch's scaler copies its scale to the host without waiting for the copy.
        torch.cuda.current_stream().synchronize()
    held = [tensor for tensor, _ in parts if tensor.numel()]
    if held:
        torch._amp_foreach_non_finite_check_and_unscale_(held, found_inf, inv_scale)
    comms = {id(comm): comm for _, owner in parts if owner is not None for comm in owner.comms}
    for comm in comms.values():
        comm.all_reduce([found_inf], "max", label="found inf").wait()
