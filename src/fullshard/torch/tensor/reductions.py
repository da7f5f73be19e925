# SPDX-License-Identifier: Apache-2.0
"""Norms, sums, extremes and truth values of whole parameters, of which each rank holds a span.

[Note: Norms across ranks]
A p-norm is (sum of |x|^p)^(1/p). Each rank takes the norm of its span in fp64, and the ranks add
the p-th powers, so that nothing overflows which the norm itself would not. What is rounded to the
tensor's own dtype, once, is as good as exact: it does not depend on how many ranks there are, how
elements are cut, or how wide a processor's vectors are. So does the norm of norms that clipping
takes: see `GlobalScalar`. All tensors of a call travel in one all-reduce per communicator (one that
is cut along a tensor axis too in one more, over that); its result, and so the norm, has the same
bits on every rank. Order 0 adds counts, inf and -inf take the extreme. The maximum of a NaN and a
number is not the same in every backend, so NaNs travel beside the extremes as flags.

[Note: Ranks that loop in their own order]
Users loop over parameters and groups of them, also over a `set`, whose order is another one on
every rank. Tensors of one call are put into an agreed order; and before a call's numbers travel the
ranks compare, by 16 bytes, what they are about. Ranks on the CPU, which wait anyway, then raise; on
other devices, where nobody waits, the result is NaN.
"""

import copy
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate

from fullshard.core.errors import UsageError
from fullshard.torch.comm.protocol import ReduceOp
from fullshard.torch.tensor.ownership import Ownership


class GlobalScalar(torch.Tensor):
    """A number that every rank has: a plain 0-dim tensor that also answers ``full_tensor()``.

    Small results (0-dim and 1-d) of torch functions on it are of the same type, so that the total
    norm which torch computes from the norms of parameters is one too; it is taken in fp64, see
    [Note: Norms across ranks]. What scripts ask a replicated DTensor, it answers as one.
    """

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of a replicated DTensor."""
        return (Replicate(),)

    def to_local(self) -> Tensor:
        """Return the same number as a plain tensor, like `full_tensor`."""
        return self.full_tensor()

    def full_tensor(self) -> Tensor:
        """Return the same number as a plain tensor; nothing is communicated."""
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalScalar":
        """Copy the number into memory of its own."""
        made: GlobalScalar = copy.deepcopy(self.full_tensor(), memo).as_subclass(GlobalScalar)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor, so that any reader can load it."""
        plain = self.full_tensor()
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func``; keep the type of small new tensors and leave all else as it comes."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.linalg.vector_norm and not kwargs and len(args) <= 2:
                values = args[0]
                result = func(values.double(), *args[1:]).to(values.dtype)
            else:
                result = func(*args, **(kwargs or {}))
        if (
            type(result) is torch.Tensor
            and func is not torch.Tensor.as_subclass
            and result.dim() <= 1
            and not any(result is arg for arg in args)
        ):
            return result.as_subclass(cls)
        return result


class SummedScalar(GlobalScalar):
    """A norm or sum of parameters that are cut by elements, as a wrapper's are.

    FSDP1 gives each rank that of its own part, and code for it adds up squares of norms over the
    ranks itself. Here that counts each number once a rank: who does it is warned.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` as for a `GlobalScalar`; warn of a sum over ranks."""
        if (kwargs or {}).get("op") == dist.ReduceOp.SUM:  # as only reductions over ranks have
            warnings.warn(_COUNTED_TWICE, stacklevel=5)
        return super().__torch_function__(func, types, args, kwargs)


_COUNTED_TWICE = (
    "this adds up, over ranks, what was computed from norms or sums of sharded parameters or "
    "gradients. They are of the whole model already, the same on every rank, so each is counted "
    "once a rank. Leave the reduction out, or call model.clip_grad_norm_(); the norm of this "
    "rank's part is param.grad.to_local().norm(). Before a mean over ranks say norm.full_tensor()"
)


def _scalar(number: Tensor, owners: Sequence[Ownership]) -> Tensor:
    by_elements = any(each.placed is None and each.comm.size > 1 for each in owners)
    return number.as_subclass(SummedScalar if by_elements else GlobalScalar)


def global_norms(
    parts: Sequence[tuple[Tensor, Ownership | None]], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of order ``order`` of each whole tensor; see [Note: Norms across ranks].

    ``parts`` are (tensor, None) for what every rank has whole, and (span, ownership) otherwise.
    Returns 0-dim tensors of ``dtype``, by default the real dtype of each part. Collective over the
    communicators of the parts.
    """
    norms: list[Tensor | None] = [None] * len(parts)
    by_comms: dict[tuple[int, ...], list[tuple[Ownership, int]]] = {}
    whole: list[int] = []
    for i, (_, ownership) in enumerate(parts):
        if ownership is None or all(comm.size == 1 for comm in ownership.comms):
            whole.append(i)
        else:
            by_comms.setdefault(tuple(map(id, ownership.comms)), []).append((ownership, i))
    if whole:
        found = _local_norms([parts[i][0] for i in whole], order)
        for i, norm in zip(whole, found.unbind(), strict=True):
            norms[i] = norm.to(dtype or parts[i][0].dtype.to_real())
    groups = [sorted(each, key=lambda part: part[0].place) for each in by_comms.values()]
    for group in sorted(groups, key=lambda group: group[0][0].place):
        indices = [i for _, i in group]
        locals_ = [parts[i][0] for i in indices]
        totals = _combine(_local_norms(locals_, order), order, [owner for owner, _ in group])
        wanted = [dtype or local.dtype.to_real() for local in locals_]
        cast = {each: totals.to(each).unbind() for each in set(wanted)}
        for place, (i, each) in enumerate(zip(indices, wanted, strict=True)):
            norms[i] = cast[each][place]
    owners = [owner for _, owner in parts if owner is not None]
    return [_scalar(norm, owners) for norm in norms if norm is not None]


_PIECE_NUMEL = 2**16  # of which a CPU makes an fp64 copy that stays in its cache


def _local_norms(locals_: Sequence[Tensor], order: float) -> Tensor:
    """Return the norms of the spans as one fp64 vector; an empty span counts for nothing."""
    nothing = math.inf if order == -math.inf or -math.inf < order < 0 else 0.0
    norms = [torch.full((), nothing, dtype=torch.float64, device=locals_[0].device)] * len(locals_)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, local in enumerate(locals_):
        if local.numel():
            by_dtype.setdefault(local.dtype, []).append(i)
    for dtype, indices in by_dtype.items():
        wide = torch.complex128 if dtype.is_complex else torch.float64
        exact = math.isinf(order)  # and then the fastest way is as good
        pieces: list[Tensor] = []
        counts: list[int] = []
        for i in indices:
            split = _pieces(locals_[i].detach()) if order > 0 and not exact else [locals_[i]]
            pieces += split
            counts.append(len(split))
        taken = iter(torch._foreach_norm(pieces, order, None if exact or dtype is wide else wide))
        for i, count in zip(indices, counts, strict=True):
            found = list(islice(taken, count))
            norms[i] = found[0]
            if count > 1:
                norms[i] = torch.linalg.vector_norm(torch.stack(found), order, dtype=torch.float64)
    return torch.stack([norm.double() for norm in norms])


def _pieces(local: Tensor) -> list[Tensor]:
    """Split the elements into parts that a CPU can widen one by one."""
    if local.device.type != "cpu" or local.numel() <= _PIECE_NUMEL or not local.is_contiguous():
        return [local]
    return list(torch.split(local.view(-1), _PIECE_NUMEL))


def _combine(norms: Tensor, order: float, owners: Sequence[Ownership]) -> Tensor:
    alike = _are_alike(owners, norms.device)
    if math.isinf(order):
        sign = math.copysign(1.0, order)
        extremes = torch.stack([norms.nan_to_num(math.inf, posinf=math.inf) * sign, norms.isnan()])
        owners[0].combine([extremes], "max")
        return torch.where((extremes[1] > 0) | ~alike, math.nan, extremes[0] * sign)
    if order not in (0, 1):
        norms = norms.pow(order)
    owners[0].combine([norms])
    return torch.where(alike, norms if order in (0, 1) else norms.pow(1 / order), math.nan)


def _are_alike(owners: Sequence[Ownership], device: torch.device) -> Tensor:
    """Return, as a 0-dim bool, if all ranks are about to add up the same parameters. Collective.

    See [Note: Ranks that loop in their own order]. Raises `UsageError` on all ranks instead of
    False if that is known without waiting.
    """
    alike = torch.ones((), dtype=torch.bool, device=device)
    names = [owner.name for owner in owners]
    number = zlib.crc32("\n".join(names).encode()) & 0xFFFF
    for comm in owners[0].comms:
        if comm.size == 1:
            continue
        # All numbers are equal if and only if their variance is 0; these sums are exact.
        # Filled, for a copy of a list to a device would hold up the host.
        sums = torch.full((2,), number, dtype=torch.float64, device=device)
        sums[1].fill_(number**2)
        comm.all_reduce([sums], label="comparison of what a norm or sum is of").wait()
        alike = alike & (comm.size * sums[1] - sums[0] ** 2 < 0.5)
    if device.type == "cpu" and not bool(alike):
        shown = f"{names[:3]}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        raise UsageError(
            f"this rank takes the norm, sum or extreme of {shown}, and another rank at the same "
            "time that of other parameters, so the numbers would be mixed. Loop over parameters, "
            "and groups of them, in the same order on all ranks: not over a set(), but over "
            "sorted(model.named_parameters())"
        )
    return alike


def global_truth(local: Tensor, ownership: Ownership, *, every: bool) -> Tensor:
    """Return ``all`` (``every``) or ``any`` of the whole parameter, a 0-dim bool. Collective."""
    _are_alike([ownership], local.device)
    mine = local.all() if every else local.any()
    votes = mine.to(torch.int32).reshape(1)
    ownership.combine([votes], "min" if every else "max")
    return votes[0].bool().as_subclass(GlobalScalar)


def global_sum(local: Tensor, ownership: Ownership, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of the whole parameter, 0-dim; int64 for integers and bools. Collective.

    Added up in fp64, and so, when rounded to ``dtype``, closer than one process's sum.
    """
    alike = _are_alike([ownership], local.device)
    if local.is_complex():
        total = torch.view_as_real(local).double().reshape(-1, 2).sum(0)
    else:
        total = local.sum(dtype=torch.float64 if local.is_floating_point() else torch.int64)
    ownership.combine([total])
    if local.is_complex():
        total = torch.view_as_complex(total)
    if total.dtype != torch.int64:
        total = torch.where(alike, total, math.nan)
    counted = local.dtype if total.dtype != torch.int64 else torch.int64
    return _scalar(total.to(dtype or counted), [ownership])


def global_extreme(local: Tensor, ownership: Ownership, *, largest: bool) -> Tensor:
    """Return the largest or smallest element, 0-dim; NaN if any element is NaN. Collective."""
    op: ReduceOp = "max" if largest else "min"
    alike = _are_alike([ownership], local.device)
    floating = local.is_floating_point()
    wide = torch.float64 if floating else torch.int64
    bounds = torch.iinfo(torch.int64)
    least, most = (-math.inf, math.inf) if floating else (bounds.min, bounds.max)
    nothing = least if largest else most
    mine = torch.full((), nothing, dtype=wide, device=local.device)
    if local.numel():
        mine = (local.max() if largest else local.min()).to(wide)
    is_nan = mine.isnan().to(wide)
    mine = mine.nan_to_num(nothing, posinf=math.inf, neginf=-math.inf) if floating else mine
    for comm in ownership.comms:
        comm.all_reduce([mine], op).wait()
        comm.all_reduce([is_nan], "max").wait()
    if floating:
        mine = torch.where((is_nan > 0) | ~alike, math.nan, mine)
    return mine.to(local.dtype).as_subclass(GlobalScalar)


def global_statistic(
    local: Tensor, ownership: Ownership, statistic: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return ``statistic`` of the whole parameter, 0-dim. Collective; it is gathered for that."""
    _are_alike([ownership], local.device)
    return statistic(ownership.gathered(local)).as_subclass(GlobalScalar)


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
