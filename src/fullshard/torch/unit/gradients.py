# SPDX-License-Identifier: Apache-2.0
"""The gradients of one unit on their way: full as autograd makes them, reduced, sharded, delivered.

[Note: Two sums]
Gradients are summed over the ranks that share slices by a reduce-scatter, and the result over those
that hold equal slices by an all-reduce. Sums travel in the reduce dtype. They are divided by the
number of ranks after they have been cast to the dtype in which they rest; in fp16, whose range is
small, by the power of two next to its square root before, and by the rest after.

[Note: Asking a device]
On a CPU a reduce that has completed gives its memory back at once. A device is not asked: its host
runs ahead, and answers would differ between ranks and steps, and with them what allocators do.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fullshard.torch.comm.protocol import Done, Full, Parts, Work
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import Division, FlatBuffer, dtype_of, lie_alike
from fullshard.torch.unit.full_gradients import FullGradients
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.shards import Shards
from fullshard.torch.unit.streams import CopyStream

_DONE = Done()


class ReduceSettings:
    """The settings of a unit's reduce that users may change, alike on all ranks."""

    def __init__(self) -> None:
        self.all_reduce = True  # over the replicas; else sums are kept until it is wanted
        self.divide_factor: float | None = None  # instead of the number of ranks
        self.sources: frozenset[int] = (
            frozenset()
        )  # global ranks whose samples come, if not its own
        self.hook: Callable[[Tensor, Tensor], None] | None = None  # (full, shard) -> fills shard
        self.all_reduce_hook: Callable[[Tensor], None] | None = None  # changes a reduced slice
        self.reduce_scatter: Callable[[Tensor, Tensor], Any] | None = None  # (shard, full) -> work
        self.on_delivered: list[Callable[[], None]] = []  # called when ``.grad`` stays as it is


class Gradients:
    """The full gradients of a unit, and their reduce."""

    def __init__(self, name: str, shards: Shards, plan: Plan, settings: ReduceSettings):
        self.rename(name)
        self.settings = settings
        self._shards = shards
        self._plan = plan
        segments = shards.trainable
        travel = [dtype_of(s.grad_dtype) for s in segments]
        keep = plan.precision.keep_low_grads
        rest = travel if keep else [dtype_of(s.dtype) for s in segments]
        numels = [segment.numel_of(plan.ranks.gather.rank) for segment in segments]
        self._slice_sizes = list(zip(numels, travel, strict=True))
        self._rest_sizes = list(zip(numels, rest, strict=True))
        self._unequal = any(segment.ends for segment in segments)
        self._is_cast = self._rest_sizes != self._slice_sizes
        self._rests_alike = lie_alike(self._slice_sizes, self._rest_sizes)
        self._pieces = shards.pieces()
        self._contributions = plan.ranks.size
        self._low_range = any(segment.grad_dtype == "float16" for segment in segments)
        self._solo = plan.ranks.gather.size == 1
        self._moves = plan.resting_device != plan.device
        self.full: FullGradients = FullGradients(shards, plan)
        self.trained: list[int] = self.full.trained
        self.absent: set[int] | None = None  # in no reduce since `settle` was called
        self._zeroed: list[int] = []  # of those, the ones whose ``.grad`` was None until then
        self._to_tell = False  # ``on_delivered`` waits for `settle`, which may take zeros away
        self._reduced: FlatBuffer | None = None
        self._work: Work | None = None
        self._scattered = False  # the first of the two sums is there
        self._kept: FlatBuffer | None = None  # sums over slices that replicas have not seen yet
        self._average = Division(one_pass=plan.device.type != "cpu")
        self._to_host = CopyStream(plan.device, "to the host")
        self._leaving: list[FlatBuffer] = []  # being copied to the host

    def rename(self, name: str, model: str = "") -> None:
        """Take the name of the unit, and what tells its model from others of the same ranks."""
        self._name = name
        self._label = f"reduce of unit {name!r}{model}"

    @property
    def transient_bytes(self) -> int:
        """Bytes that gradients hold now, and what a reduce needs, but for shards at rest."""
        held = self.full.bytes + sum(each.bytes for each in self._leaving)
        if self._kept is not None:
            held += self._kept.bytes
        if self._work is not None and not self._scattered:
            held += sum(map(self._plan.ranks.reduce.reduce_scratch_bytes, self.full.sent))
        return held

    # ---- full gradients -------------------------------------------------------------------------

    def drop(self) -> None:
        """Forget full gradients, under way or not, after a backward that failed."""
        if self._work is not None:
            self._work.wait()
        self._work, self._reduced, self._scattered, self._kept = None, None, False, None
        self.absent, self._to_tell = None, False
        self._zeroed.clear()
        self.full.drop()

    def settle(self, used: list[float] | None) -> None:
        """Take away zeros of parameters that no rank has used (None: keep all).

        ``used`` has a number for each trainable parameter, 0 where nobody has.
        """
        if used is not None:
            unused = {index for index, each in zip(self.trained, used, strict=True) if not each}
            for index in unused.intersection(self._zeroed):
                self._shards.sharded[index].grad = None
        self.absent = None
        self._zeroed.clear()
        if self._to_tell:
            self._tell()

    def _tell(self) -> None:
        self._to_tell = False
        for tell in self.settings.on_delivered:
            tell()

    # ---- the reduce -----------------------------------------------------------------------------

    @property
    def reducing(self) -> bool:
        """True while a reduce is in flight."""
        return self._work is not None

    @property
    def kept(self) -> bool:
        """True if sums over slices wait for those over replicas."""
        return self._kept is not None

    @property
    def completed(self) -> bool:
        """True if `await_all` would wait for nothing. See [Note: Asking a device]."""
        if self._work is None:
            return True
        if not (self._scattered or self._plan.ranks.replicas.size == 1):
            return False
        if self.settings.all_reduce_hook is not None:
            return False  # it may be collective, and what is complete differs from rank to rank
        if self._plan.device.type != "cpu":
            return isinstance(self._work, Done)
        return self._work.is_completed()

    def reduce(self) -> None:
        """Start to sum full gradients over the slices; what did not come is zero (collective)."""
        if self._work is not None:
            self.await_all()  # what was left under way is in the same buffer
        full, settings = self.full, self.settings
        users_write = settings.hook is not None or settings.reduce_scatter is not None
        absent = full.send(written=users_write)
        self.absent = absent if self.absent is None else self.absent & absent
        before = self._divisors()[0] if self._low_range else 1
        if before != 1:
            for flat in full.by_dtype():
                flat.div_(before)
        if self._solo:
            # With one slice the full gradient is the shard: its memory goes with it.
            self._reduced, self._work = full.give_away(), _DONE
            if self.settings.hook is not None:
                for flat in self._reduced.flats:
                    self.settings.hook(flat, flat)
            self.all_reduce()
            return
        self._reduced = FlatBuffer(self._slice_sizes, self._plan.device)
        pairs = list(zip(self._reduced.flats, full.sent, strict=True))
        self._work = self._reduce_scatter(pairs)

    def _reduce_scatter(self, pairs: list[tuple[Tensor, Tensor]]) -> Work:
        settings, segments = self.settings, self._shards.trainable
        if self._unequal:
            sent: list[tuple[Tensor, Full]] = [
                (shard, flat if segment.unequal is None else Parts(flat, segment.unequal))
                for (shard, flat), segment in zip(pairs, segments, strict=True)
            ]
            return self._plan.ranks.reduce.reduce_scatter(sent, label=self._label)
        if settings.hook is not None:
            for shard, flat in pairs:
                settings.hook(flat, shard)
            return _DONE
        if settings.reduce_scatter is not None:
            for shard, flat in pairs:
                work = settings.reduce_scatter(shard, flat)
                if work is not None:
                    work.wait()
            return _DONE
        return self._plan.ranks.reduce.reduce_scatter(pairs, label=self._label)

    def all_reduce(self) -> None:
        """Await the sum over slices, drop full gradients, start to sum over replicas."""
        if self._work is None or self._scattered:
            return
        self._work.wait()
        self._scattered = True
        self.full.release()
        reduced = self._reduced
        assert reduced is not None
        if self._kept is not None:
            for flat, earlier in zip(reduced.by_dtype, self._kept.by_dtype, strict=True):
                flat.add_(earlier)
            self._kept = None
        replicas = self._plan.ranks.replicas
        if replicas.size == 1 or self.settings.hook is not None:
            self._work = _DONE
        elif not self.settings.all_reduce:
            self._kept, self._work = reduced, _DONE
        else:
            label = f"all-reduce of unit {self._name!r}"
            self._work = replicas.all_reduce(reduced.flats, label=label)

    def await_all(self) -> bool:
        """Await what is in flight and add the result, averaged over the ranks, to ``.grad``.

        False if nothing was in flight.
        """
        if self._work is None:
            return False
        self.all_reduce()
        if self._work is not _DONE:
            self._work.wait()
        reduced = self._reduced
        self._work, self._reduced, self._scattered = None, None, False
        assert reduced is not None
        if self._kept is not None:
            return True
        if self.settings.all_reduce_hook is not None:
            for flat in reduced.flats:
                self.settings.all_reduce_hook(flat)
        if self.absent:
            sharded = self._shards.sharded
            self._zeroed += [index for index in self.absent if sharded[index].grad is None]
        keeps_dtype = not self._plan.precision.keep_low_grads
        for flat, (numels, params) in zip(self._to_rest(reduced).flats, self._pieces, strict=True):
            # Unsafe for who writes to both ``flat`` and a part of it in a graph, which nobody does.
            for param, local in zip(params, flat.unsafe_split_with_sizes(numels), strict=True):
                if param is not None and param.requires_grad:
                    grad = ShardedParameter.value(local, param.ownership)
                    _accumulate(param, grad, keeps_dtype)
        if self.full.lenders is not None:
            self.full.lenders.follow()
        if self._zeroed:
            self._to_tell = True
        else:
            self._tell()
        return True

    def _divisors(self) -> tuple[float, float]:
        """The factors that divide gradients before and after their sums. See [Note: Two sums]."""
        if self.settings.hook is not None:
            return 1, 1  # a communication hook divides as it likes
        factor = self.settings.divide_factor or len(self.settings.sources) or self._contributions
        if not self._low_range:
            return 1, factor
        before = 2.0 ** round(math.log2(factor) / 2)
        return before, factor / before

    def _to_rest(self, reduced: FlatBuffer) -> FlatBuffer:
        """Reduced gradients, averaged, in the dtype and on the device in which they rest."""
        _, after = self._divisors()
        resting = FlatBuffer(self._rest_sizes, self._plan.device) if self._is_cast else reduced
        if self._rests_alike:  # by one call, over what lies between slices too, which nobody reads
            pairs = zip(resting.by_dtype, reduced.by_dtype, strict=True)
        else:
            pairs = zip(resting.flats, reduced.flats, strict=True)
        for to, flat in pairs:
            self._average(to, flat, after)
        return self._evict(resting) if self._moves else resting

    def _evict(self, onboard: FlatBuffer) -> FlatBuffer:
        """A copy in host memory, which is there after `synchronize`."""
        sizes = [(flat.numel(), flat.dtype) for flat in onboard.flats]
        host = FlatBuffer(sizes, self._plan.resting_device, pin=self._plan.pin)
        with self._to_host.behind_compute():
            host.memory.copy_(onboard.memory, non_blocking=True)
        self._leaving.append(onboard)
        if any(param.grad is not None or _has_hooks(param) for param in self._shards.sharded):
            self.synchronize()  # the host adds to them, or looks at them, at once
        return host

    def let_go(self) -> None:
        """Give back the device's copies of gradients that leave it: what follows waits for them."""
        if self._leaving:
            self._to_host.join()
            if self.full.lenders is not None:
                self.full.lenders.follow()
            self._leaving.clear()

    @property
    def last_copy(self) -> Any:
        """The event behind which gradients are in the host's memory, or None."""
        return self._to_host.last

    def synchronize(self) -> None:
        """Block the host until offloaded gradients have reached its memory."""
        self._to_host.synchronize()
        self._leaving.clear()


def _has_hooks(param: ShardedParameter) -> bool:
    later = getattr(param, "_post_accumulate_grad_hooks", None) or _IN_BACKWARD in param.__dict__
    return bool(param._backward_hooks or later)


_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute in which torch.distributed.optim._apply_optimizer_in_backward leaves optimizers."""


def _accumulate(param: ShardedParameter, grad: Tensor, keeps_dtype: bool) -> None:
    """Add a reduced gradient to ``param.grad`` as autograd would, users' hooks included.

    ``keeps_dtype``: it has that of the parameter.
    """
    hooks = param._backward_hooks
    if hooks:
        for hook in hooks.values():
            changed = hook(grad)
            grad = grad if changed is None else changed
    earlier = param.grad
    if earlier is not None:
        earlier.add_(grad)
    else:
        if not keeps_dtype and grad.dtype != param.dtype:
            param.grad_dtype = None
        param.grad = grad
    hooks = param._post_accumulate_grad_hooks
    if hooks:
        for hook in hooks.values():
            hook(param)
    if _IN_BACKWARD in param.__dict__:
        for optimizer in param.__dict__[_IN_BACKWARD]:
            optimizer.step()
        param.grad = None
