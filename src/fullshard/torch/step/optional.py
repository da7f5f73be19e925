# SPDX-License-Identifier: Apache-2.0
"""Optional units: ranks ask each other which of them still want to run one, before they go on.

[Note: Asking before going on]
A rank that leaves an optional unit out cannot know that others run it, and they need its slices. So
in the forward of the unit around it, ranks meet before each unit inside begins, and before that
forward ends. Each says in one small all-reduce in host memory which optional unit it wants to run
next, if any. As long as one is wanted, all take part in the first of them: those that want it run
it, the others gather it with them and drop it, and tell the same events to the schedule, which so
stays the same on all ranks. Then they ask again. When nobody wants one, all are at the same place.
What backward needs of a rank follows from its events: [Note: Left out] in
`core/schedule/step.py`.

[Note: Recomputing together]
A recomputation asks like a forward, so all ranks must come to it at the same place: when backward
comes to the unit that is recomputed as a whole. Autograd would begin it where it first misses a
tensor, which on each rank is another place, or none. So such a unit saves a tensor of its own, and
reads it when its backward begins. Ranks whose backward does not reach the unit, since they have
left it out, or nothing leads there, are told with the votes or know by themselves that it is
recomputed, and take part.

[Note: Runs to come]
With its vote each rank says how many runs of optional units it will still begin in this forward, if
it knows: by ``using``, or since it only takes part. Once the sum over the ranks is zero, nobody can
want one any more, and nothing is asked until that forward ends. A rank that does not know says
infinity.

[Note: Mean over users]
A reduce divides by all ranks. Where a gradient shall be the mean over the ranks that used a unit in
a forward, those ranks multiply theirs by ranks / users as autograd delivers them. Ranks count the
users when the root's forward ends; the root's call carries the weights until its backward begins.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.schedule.step import StepMachine
from fullshard.core.schedule.unit_step import Phase, UnitStep
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.step.calls import WatchedCall
from fullshard.torch.step.executor import Executor
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.step.usage import carries_host_memory
from fullshard.torch.unit.changes import take_over

__all__ = ["OptionalUnits", "optional_units", "reachable"]


class _Question:
    """The optional units directly inside one unit, and the ranks that are asked about them."""

    def __init__(self, around: ManagedUnit, inside: Sequence[ManagedUnit]):
        self.around, self.inside = around, list(inside)
        self.recomputed = False  # the forward of the unit around that runs now
        self.checkpoint: Callable[[], object] = lambda: None  # in which a unit ran last
        self.to_come: dict[ManagedUnit, float] = {}  # runs that this rank will begin in it
        self.quiet = False  # nobody will want one any more
        self.ranks = (self.inside or [around])[0].unit.ranks
        self.comms = _several(self.inside[0] if self.inside else around)
        for managed in self.inside:
            if _several(managed) != self.comms:
                raise NotSupportedError(
                    f"optional units {self.inside[0].unit.name!r} and {managed.unit.name!r} are "
                    "sharded over different ranks, and lie directly inside the same unit, "
                    f"{around.unit.name!r}, where all their ranks are asked together; shard them "
                    "over the same ranks, or give each a unit of its own around it"
                )
        if not all(map(carries_host_memory, self.comms)):
            raise NotSupportedError(
                f"optional units inside unit {around.unit.name!r}: ranks ask each other in host "
                "memory, which their process group does not carry; initialise it with "
                'init_process_group("cpu:gloo,cuda:nccl")'
            )

    def begin(self, runs: float | None = None) -> None:
        """Begin a forward of the unit around, with so many ``runs`` of each, or those declared."""
        self.quiet = False
        self.to_come = {m: m.declared_runs if runs is None else runs for m in self.inside}

    def run(self, managed: ManagedUnit) -> None:
        """Count a run that begins on this rank; refuse one more than were declared."""
        self.to_come[managed] -= 1
        if self.to_come[managed] < 0:
            raise UsageError(
                f"optional unit {managed.unit.name!r} runs more often in a forward of unit "
                f"{self.around.unit.name!r} than this rank has said by using(...); say how often "
                "it runs here (True means once), or leave it out of using(...) on this rank"
            )

    def ask(self, wanted: ManagedUnit | None, here: int, uneven: bool) -> tuple[list[bool], bool]:
        """Return which units inside are wanted by some rank, and if ranks have parted before.

        ``here`` is a number for what comes next on this rank if nobody wants one. Collective.
        """
        units = len(self.inside)
        votes = torch.zeros(2 * units + 4, dtype=torch.float64)
        if wanted is not None:
            votes[self.inside.index(wanted)] = 1
            again = wanted.step.recomputed and torch.is_grad_enabled()
            votes[units + self.inside.index(wanted)] = float(again)
        votes[-4] = sum(self.to_come.values())
        votes[-3], votes[-2], votes[-1] = uneven, here, here * here
        label = f"question for optional units in unit {self.around.unit.name!r}"
        for comm in self.comms:
            comm.all_reduce([votes], label=label).wait()
        *counts, to_come, parted, total, squares = votes.tolist()
        counts, recomputed = counts[:units], counts[units:]
        size = self.ranks.size
        self.quiet = to_come == 0 and sum(map(bool, counts)) <= 1
        if not any(counts) and size * squares != total * total:
            raise UsageError(
                f"inside unit {self.around.unit.name!r} ranks have come to different units, and "
                "none of them is optional; mark those that ranks may leave out (mark_optional)"
            )
        if not any(counts) and not here and 0 < to_come < math.inf:
            raise UsageError(
                f"the forward of unit {self.around.unit.name!r} ends, and {to_come:.0f} runs of "
                "optional units inside it have not come that ranks have announced by using(...); "
                f"on this rank: {self._missing() or 'none'}"
            )
        for managed, count, again in zip(self.inside, counts, recomputed, strict=True):
            if 0 < again < count:
                raise UsageError(
                    f"optional unit {managed.unit.name!r} runs in a checkpoint on {again:.0f} of "
                    f"the {count:.0f} ranks that run it now; recompute it on all of them or on none"
                )
            if count and torch.is_grad_enabled():
                managed.step.recomputed = again > 0
        return [count > 0 for count in counts], bool(parted) or any(0 < c < size for c in counts)

    def _missing(self) -> str:
        return ", ".join(f"{m.unit.name!r}" for m, runs in self.to_come.items() if runs)


class OptionalUnits:
    """Lets ranks meet where units of one root are optional. See the note above."""

    def __init__(
        self, asked: Mapping[UnitStep, _Question], machine: StepMachine, executor: Executor
    ):
        self._asked, self._machine, self._executor = asked, machine, executor
        self._uneven = False  # some rank has left out a unit that another one has run
        self._alike = False  # ranks have compared what they have marked
        self._following = False  # others recompute a unit, in a backward of all
        self._by_users = [m for m in executor.units if m.step.optional and m.mean_over == "users"]
        self._weighed: dict[ManagedUnit, float] = {}  # in the backward that runs

    def before(self, managed: ManagedUnit, *, recomputing: bool) -> None:
        """Take part in what other ranks run before ``managed`` begins its forward here."""
        running = self._machine.running
        place = self._asked.get(running[-1]) if running else None
        within = self._asked.get(managed.step)
        again = _checkpoint_around() is not None
        if within is not None:
            within.recomputed = again
            within.begin(math.inf if recomputing else None)
        if torch.is_grad_enabled() and not recomputing:  # which does as its forward did
            begins_here = again and (place is None or not place.recomputed)
            whole = within is not None
            if begins_here and managed.step.optional:
                whole = _checkpointed() is managed
                if not whole:
                    self._refuse_part_of_checkpoint(managed, place)
            managed.step.recomputed = begins_here and whole
        if recomputing and managed.step.optional and managed.step.phase is Phase.AT_REST:
            raise NotSupportedError(
                f"optional unit {managed.unit.name!r} is recomputed by a reentrant checkpoint, in "
                "whose backward the other ranks take no part: pass use_reentrant=False"
            )
        if place is not None and (managed.step.optional <= (managed in place.inside)):
            self._meet(place, managed)
        elif managed.step.optional and not recomputing:
            raise UsageError(
                f"optional unit {managed.unit.name!r} runs outside of the forward of the unit "
                "around it, where no other rank is asked whether it runs it, too; call it there"
            )

    @staticmethod
    def _refuse_part_of_checkpoint(managed: ManagedUnit, place: _Question | None) -> None:
        """Refuse what other ranks could not follow: backward runs forwards that nobody foresees.

        One unit of a part may run so, as all ranks run it that run the part.
        """
        around = _checkpoint_around()
        inside_part = place is not None and place.around.step.optional
        if place is None or not inside_part or place.checkpoint() is around:
            raise NotSupportedError(
                f"optional unit {managed.unit.name!r} runs in a checkpoint of a function around "
                "it, which ranks that leave the unit out could not follow in backward: checkpoint "
                "the unit's own module (checkpoint(module, x, use_reentrant=False)), or shard the "
                "module whose forward that function is, too, and checkpoint that"
            )
        place.checkpoint = weakref.ref(around)

    def before_end(self, managed: ManagedUnit) -> None:
        """Take part in what other ranks run before the forward of ``managed`` ends here."""
        place = self._asked.get(managed.step)
        if place is not None and self._machine.running[-1] is managed.step:
            self._meet(place, None)

    def follow_recomputation(self, managed: ManagedUnit) -> None:
        """Take part in what other ranks run while they recompute ``managed``. Collective."""
        self._following = True
        try:
            self._take_part(managed)
        finally:
            self._following = False

    def _compare_marks(self) -> None:
        """Raise `ConfigurationError` on all ranks if they have marked different units. Collective.

        Votes of different lengths would end the processes, without a word of what is wrong.
        """
        marks = {
            f"optional inside unit {question.around.unit.name!r}": ", ".join(
                repr(managed.unit.name) for managed in question.inside
            )
            for question in self._asked.values()
        }
        users = ", ".join(repr(managed.unit.name) for managed in self._by_users)
        marks["gradients are means over users of"] = users
        for comm in _several(self._executor.units[0]):
            verify_agreement(comm, marks, torch.device("cpu"), "the units that are optional")
        self._alike = True

    def _meet(self, place: _Question, coming: ManagedUnit | None) -> None:
        if not self._alike:
            self._compare_marks()
        here = 0 if coming is None else coming.number + 1
        wanted = coming if coming is not None and coming.step.optional else None
        if wanted is not None:
            place.run(wanted)
        while not place.quiet:
            asked, self._uneven = place.ask(wanted, here, self._uneven)
            if True not in asked:
                return
            chosen = place.inside[asked.index(True)]
            if chosen is wanted:
                return
            self._take_part(chosen)

    def _take_part(self, managed: ManagedUnit) -> None:
        """Do for a unit's forward on other ranks what they need of this one. Collective."""
        if managed.unit.on_meta:
            take_over(managed.unit)
        training = not self._executor.evaluating
        with_grad = training and not self._following  # its backward has been foreseen
        within = self._asked.get(managed.step)
        if within is not None:
            within.begin(0)
        self._executor.do(self._machine.forward_begins(managed.step, with_grad=with_grad))
        self.before_end(managed)
        self._executor.do(self._machine.forward_ends(managed.step, training=training))

    def settle(self, units: Sequence[ManagedUnit]) -> bool:
        """Let all ranks know which units' backward may come on any rank, at a forward's end.

        Returns True if this one's may come on another rank only. Collective, unless all ranks have
        run the same and no gradient is a mean over users.
        """
        by_ranks: dict[tuple[Comm, ...], list[ManagedUnit]] = {}
        for managed in units:
            by_ranks.setdefault(_several(managed), []).append(managed)
        uneven, self._uneven = self._uneven or bool(self._by_users), False
        may_come = False
        root = self._executor.units[0].step.call
        weights: dict[ManagedUnit, float] = {}
        if self._by_users and isinstance(root, WatchedCall):
            root.weights = weights
        for comms, together in by_ranks.items():
            mine = [self._machine.leads_back(managed.step) for managed in together]
            leads = torch.tensor(mine, dtype=torch.float64)
            if uneven:
                for comm in comms:
                    label = "which units a backward may reach"
                    comm.all_reduce([leads], label=label).wait()
            for managed, users in zip(together, leads.tolist(), strict=True):
                if managed.step.partial:
                    self._machine.settle(managed.step, leads_back=bool(users))
                    may_come |= bool(users)
                if users and managed in self._by_users:
                    weights[managed] = managed.unit.ranks.size / users
        return may_come

    def begin_backward(self) -> None:
        """Forget what the gradients of another backward counted."""
        self._weighed = {}

    def weigh(self, weights: dict[ManagedUnit, float]) -> None:
        """Let gradients count as in the forward of the root whose backward begins now.

        Raises `UsageError`, on all ranks, if it differs from that of another one in this backward:
        autograd adds up gradients from both before anybody sees them.
        """
        weighed, self._weighed = self._weighed, self._weighed | weights
        for managed, weight in weights.items():
            if weighed.get(managed, weight) != weight:
                raise UsageError(
                    f"optional unit {managed.unit.name!r}, whose gradients are means over the "
                    "ranks that used it, was used by different numbers of ranks in two forwards "
                    "that one backward goes through; run a backward for each forward, or mark it "
                    'with mean_over="ranks"'
                )

    def weighed(self, managed: ManagedUnit, grad: Tensor) -> Tensor:
        """Return a gradient of a unit as it counts in the mean over ranks."""
        weight = self._weighed.get(managed, 1.0)
        return grad if weight == 1 else grad * weight  # others may have this memory, too


def optional_units(
    root: nn.Module, machine: StepMachine, executor: Executor
) -> OptionalUnits | None:
    """Return what asks about the optional units below ``root``; None if there is none.

    Raises:
        UsageError: the root's own unit, or one that no unit encloses, is optional.
        NotSupportedError: the ranks of optional units cannot be asked together, or not at all.
    """
    units = executor.units
    if not any(managed.step.optional for managed in units):
        return None
    inside: dict[ManagedUnit, list[ManagedUnit]] = {units[0]: []}
    for around, managed in set(_enclosed(root, None, set())):
        if not managed.step.optional:
            continue
        if around is None:
            raise UsageError(
                f"unit {managed.unit.name!r} is optional, and no unit encloses it, in whose "
                "forward ranks could be asked; shard the module that calls it, too"
            )
        inside.setdefault(around, []).append(managed)
    machine.partial = True
    for managed in units:
        managed.step.partial = managed.number > 0
    asked = {
        around.step: _Question(around, sorted(below, key=lambda each: each.number))
        for around, below in inside.items()
    }
    return OptionalUnits(asked, machine, executor)


def _enclosed(
    module: nn.Module, around: ManagedUnit | None, seen: set[tuple[int, int]]
) -> Iterator[tuple[ManagedUnit | None, ManagedUnit]]:
    """Yield the units below with the innermost unit around each; a shared one has several."""
    key = id(module), id(around)
    if key in seen:
        return
    seen.add(key)
    managed = managed_unit_of(module)
    if managed is not None and managed is not around:
        yield around, managed
        around = managed
    for child in module.children():
        yield from _enclosed(child, around, seen)


def _checkpoint_around() -> Any:
    """Return a hook of the innermost checkpoint without reentrance that runs; None if none does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__module__ == checkpoint.__name__ else None


def _checkpointed() -> ManagedUnit | None:
    """Return the unit whose module is what the innermost `checkpoint` on the stack runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    while frame is not None and "function" not in frame.f_locals:
        frame = frame.f_back
    function = None if frame is None else frame.f_locals["function"]
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__self__", function)
    return managed_unit_of(module) if isinstance(module, nn.Module) else None


def _several(managed: ManagedUnit) -> tuple[Comm, ...]:
    ranks = managed.unit.ranks
    return tuple(comm for comm in (ranks.gather, ranks.replicas) if comm.size > 1)


class _Reachable(torch.autograd.Function):
    """The output of a model on a rank whose graph leads to no parameter, while others' do."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, _lead: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *_grads: Tensor) -> tuple[None, None]:
        return None, None


def reachable() -> Callable[[Tensor], Tensor]:
    """Return what makes tensors ones that a backward can begin at, though it will find nothing."""
    lead = torch.zeros((), requires_grad=True)

    def change(tensor: Tensor) -> Tensor:
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        value: Tensor = _Reachable.apply(tensor.detach(), lead)  # type: ignore[no-untyped-call]
        return value

    return change
