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
comes to the unit that is recomputed as a whole, or, where a checkpoint is of a function that runs
optional units, to the unit in whose forward that is. Autograd would begin it where it first misses
a tensor, which on each rank is another place, or none. So units save tensors of their own at the
end of forwards in a checkpoint, which are read when that backward begins. Ranks whose backward does
not reach the unit, since they have left it out, or nothing leads there, are told with the votes or
know by themselves that it is recomputed, and take part; also in units that they run, but without
gradients, and so not again.

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

import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.schedule import Moment
from fullshard.core.schedule.step import StepMachine
from fullshard.core.schedule.unit_step import CheckpointedFunction, Phase, UnitStep
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.step.calls import WatchedCall
from fullshard.torch.step.checkpoints import (
    checkpoint_around,
    checkpointed_module,
    recompute,
    save_in_checkpoint,
)
from fullshard.torch.step.executor import Executor
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of
from fullshard.torch.step.usage import carries_host_memory
from fullshard.torch.unit.changes import take_over


class _Question:
    """The optional units directly inside one unit, and the ranks that are asked about them."""

    def __init__(self, around: ManagedUnit, inside: Sequence[ManagedUnit]):
        self.around, self.inside = around, list(inside)
        # In which the forward of the unit around runs, and one inside it whose unit recomputes it.
        self.checkpoint: weakref.ref[object] | None = None
        self.left_to_unit: Callable[[], object] = lambda: None
        self.recomputing = False  # that forward, or functions inside it
        self.runs_in_function = False  # a checkpoint of a function inside has run optional units
        self.to_come: dict[ManagedUnit, float] = {}  # runs that this rank will begin in it
        self.quiet = False  # nobody will want one any more
        self.ranks = (self.inside or [around])[0].unit.ranks
        self.comms = (self.inside[0] if self.inside else around).unit.ranks.joining
        for managed in self.inside:
            if managed.unit.ranks.joining != self.comms:
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
        self.quiet = self.runs_in_function = False
        self.to_come = {m: m.declared_runs if runs is None else runs for m in self.inside}

    def enter(self, around: object) -> None:
        """Begin a forward in the checkpoint ``around`` it, if there is one."""
        self.checkpoint = None if around is None else weakref.ref(around)
        self.left_to_unit = lambda: None

    def run(self, managed: ManagedUnit) -> None:
        """Count a run that begins on this rank; refuse one more than were declared."""
        self.to_come[managed] -= 1
        if self.to_come[managed] < 0:
            raise UsageError(
                f"optional unit {managed.unit.name!r} runs more often in a forward of unit "
                f"{self.around.unit.name!r} than this rank has said by using(...); say how often "
                "it runs here (True means once), or leave it out of using(...) on this rank"
            )

    def ask(self, wanted: ManagedUnit | None, here: int, uneven: bool) -> tuple[int, bool]:
        """Return the number of the unit that all run now, and if ranks have parted before.

        ``here`` is a number for what comes next on this rank if nobody wants one, or at most 0 for
        the end of the forward: ranks have parted if it differs there. -1 is returned if nobody
        wants one. Collective.
        """
        units = len(self.inside)
        votes = torch.zeros(2 * units + 6, dtype=torch.float64, device="cpu")
        if wanted is not None:
            votes[self.inside.index(wanted)] = 1
            again = wanted.step.recomputed is Moment.RECOMPUTATION and torch.is_grad_enabled()
            votes[units + self.inside.index(wanted)] = float(again)
        votes[-6], votes[-5] = self.runs_in_function, here > 0
        votes[-4] = sum(self.to_come.values())
        votes[-3], votes[-2], votes[-1] = uneven, here, here * here
        label = f"question for optional units in unit {self.around.unit.name!r}"
        for comm in self.comms:
            comm.all_reduce([votes], label=label).wait()
        *counts, in_functions, before_end, to_come, parted, total, squares = votes.tolist()
        counts, recomputed = counts[:units], counts[units:]
        size = self.ranks.size
        self.quiet = to_come == 0 and sum(map(bool, counts)) <= 1
        if in_functions:
            self.around.step.recomputed = Moment.RECOMPUTATION_INSIDE
        # In a recomputation some ranks may come to nothing, as their graph does not lead there.
        expected = (0, before_end) if self.recomputing else (0, size)
        alike = (before_end or size) * squares == total * total
        together = before_end in expected and (alike or not before_end)
        if not any(counts) and not together:
            raise UsageError(
                f"inside unit {self.around.unit.name!r} ranks have come to different units, and "
                "none of them is optional; mark those that ranks may leave out (mark_optional)"
            )
        if not any(counts) and here <= 0 and 0 < to_come < math.inf:
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
                managed.step.recomputed = Moment.RECOMPUTATION if again else None
        chosen = next((m.number for m, c in zip(self.inside, counts, strict=True) if c), -1)
        if chosen < 0 and before_end and here <= 0:
            chosen = round(total / before_end) - 1
        parted = parted or not (before_end or alike)
        return chosen, bool(parted) or any(0 < c < size for c in counts)

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
        # What a checkpoint ran last, with one of its hooks.
        self._function: tuple[Callable[[], object], CheckpointedFunction] = (
            lambda: None,
            CheckpointedFunction(),
        )
        self._by_users = [m for m in executor.units if m.step.optional and m.mean_over == "users"]
        self._weighed: dict[ManagedUnit, float] = {}  # in the backward that runs

    def before(self, managed: ManagedUnit, *, recomputing: bool) -> None:
        """Take part in what other ranks run before ``managed`` begins its forward here."""
        running = self._machine.running
        place = self._asked.get(running[-1]) if running else None
        within = self._asked.get(managed.step)
        first = torch.is_grad_enabled() and not recomputing  # which does as its forward did
        if first and managed.step.optional:
            self._look_for_checkpoint(managed, place)
        if within is not None:
            within.enter(checkpoint_around())
            within.recomputing = recomputing
            within.begin(math.inf if recomputing else None)
        if recomputing and managed.step.optional and managed.step.phase is Phase.AT_REST:
            raise NotSupportedError(
                f"optional unit {managed.unit.name!r} is recomputed by a reentrant checkpoint, in "
                "whose backward the other ranks take no part: pass use_reentrant=False"
            )
        asked_here = place is not None and managed.step.optional <= (managed in place.inside)
        if place is not None and asked_here:
            self._meet(place, managed)
        if first and not managed.step.optional:
            self._look_for_checkpoint(managed, place)  # now that all know what others have run
        if managed.step.optional and not asked_here and not recomputing:
            raise UsageError(
                f"optional unit {managed.unit.name!r} runs outside of the forward of the unit "
                "around it, where no other rank is asked whether it runs it, too; call it there"
            )

    def _is_recomputed_together(self, managed: ManagedUnit) -> bool:
        return managed.step.optional or managed.step in self._asked

    def _look_for_checkpoint(self, managed: ManagedUnit, place: _Question | None) -> None:
        """Note who recomputes a unit whose forward begins: itself, the unit around, or autograd.

        See [Note: Recomputing together].
        """
        around = checkpoint_around()
        managed.step.recomputed = None
        if around is None or not self._is_recomputed_together(managed):
            return
        if place is not None and place.checkpoint is not None:
            if place.checkpoint() is around:
                return
            raise NotSupportedError(
                f"optional unit {managed.unit.name!r}, or one inside it, runs in a checkpoint that "
                f"is inside another one, around unit {place.around.unit.name!r}, so it would be "
                "recomputed twice, and other ranks know of one time; keep one of the checkpoints"
            )
        if place is None or _is_checkpointed(managed):
            managed.step.recomputed = Moment.RECOMPUTATION
        elif managed.step.optional:
            if place.left_to_unit() is around:
                raise NotSupportedError(
                    f"optional unit {managed.unit.name!r} runs in a checkpoint of a function that "
                    "also runs a unit with optional units inside; checkpoint them apart"
                )
            place.runs_in_function = True
        elif place.around.step.recomputed is not Moment.RECOMPUTATION_INSIDE:
            managed.step.recomputed = Moment.RECOMPUTATION
            place.left_to_unit = weakref.ref(around)

    def before_end(self, managed: ManagedUnit) -> None:
        """Take part in what other ranks run before the forward of ``managed`` ends here."""
        place = self._asked.get(managed.step)
        if place is not None and self._machine.running[-1] is managed.step:
            self._meet(place, None)

    def save_for_recomputation(
        self, managed: ManagedUnit, call: WatchedCall | None, outputs: Sequence[Tensor]
    ) -> None:
        """Let the checkpoint in which a unit's forward has ended save what `recompute` reads."""
        around = checkpoint_around()
        if around is None:
            return
        if not self._is_recomputed_together(managed) and _is_checkpointed(managed):
            return
        saved = save_in_checkpoint(outputs)
        if call is None:  # it is recomputed, and has saved what its forward has
            return
        if self._function[0]() is not around:
            self._function = weakref.ref(around), CheckpointedFunction()
        call.function = self._function[1]
        call.function.ended_at = call.ended_at
        running = self._machine.running
        place = self._asked.get(running[-1]) if running else None
        if managed.step.recomputed is Moment.RECOMPUTATION:
            call.saved = [saved]
        elif place is not None and not place.checkpoint and place.left_to_unit() is not around:
            outer = running[-1].call
            if outer is not None:
                outer.saved = [*outer.saved, saved]

    def recompute(self, call: WatchedCall) -> None:
        """Recompute a call that backward has come to, together with other ranks. Collective."""
        saved = [tensor for reference in call.saved if (tensor := reference()) is not None]
        if call.recomputed is Moment.RECOMPUTATION:
            recompute(saved)
        else:
            self._recompute_inside(call.managed, saved)

    def follow_recomputation(self, managed: ManagedUnit, moment: Moment) -> None:
        """Take part in what other ranks run while they recompute ``managed``. Collective."""
        if moment is Moment.RECOMPUTATION_INSIDE:
            self._recompute_inside(managed, ())
            return
        self._following = True
        try:
            self._take_part(managed)
        finally:
            self._following = False

    def _recompute_inside(self, managed: ManagedUnit, saved: Sequence[Tensor]) -> None:
        """Run again what checkpoints of functions inside a unit ran, and what others run there."""
        place, running = self._asked[managed.step], self._machine.running
        place.begin(math.inf if saved else 0)
        place.checkpoint, place.recomputing = None, True
        running.append(managed.step)
        following, self._following = self._following, True
        try:
            recompute(saved)
            self._meet(place, None)
        finally:
            self._following = following
            running.pop()

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
        for comm in self._executor.units[0].unit.ranks.joining:
            verify_agreement(comm, marks, torch.device("cpu"), "the units that are optional")
        self._alike = True

    def _meet(self, place: _Question, coming: ManagedUnit | None) -> None:
        if not self._alike:
            self._compare_marks()
        here = coming.number + 1 if coming is not None else 0
        if coming is None and place.around.number == 0 and not place.recomputing:
            leads = [m.number for m in self._executor.units if self._machine.leads_back(m.step)]
            here = -(zlib.crc32(repr(leads).encode()) % 2**20)  # their squares add up exactly
        wanted = coming if coming is not None and coming.step.optional else None
        if wanted is not None:
            place.run(wanted)
        while not place.quiet:
            number, self._uneven = place.ask(wanted, here, self._uneven)
            if number < 0 or (wanted is not None and number == wanted.number):
                return
            self._take_part(self._executor.units[number])

    def _take_part(self, managed: ManagedUnit) -> None:
        """Do for a unit's forward on other ranks what they need of this one. Collective."""
        if managed.unit.on_meta:
            take_over(managed.unit)
        training = not self._executor.evaluating
        with_grad = training and not self._following  # its backward has been foreseen
        within = self._asked.get(managed.step)
        if within is not None:
            within.recomputing = self._following
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
            by_ranks.setdefault(managed.unit.ranks.joining, []).append(managed)
        uneven, self._uneven = self._uneven or bool(self._by_users), False
        may_come = False
        root = self._executor.units[0].step.call
        weights: dict[ManagedUnit, float] = {}
        if self._by_users and isinstance(root, WatchedCall):
            root.weights = weights
        for comms, together in by_ranks.items():
            mine = [self._machine.leads_back(managed.step) for managed in together]
            leads = torch.tensor(mine, dtype=torch.float64, device="cpu")
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


def _is_checkpointed(managed: ManagedUnit) -> bool:
    module = checkpointed_module()
    return module is not None and managed_unit_of(module) is managed


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
    lead = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)

    def change(tensor: Tensor) -> Tensor:
        if tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        value: Tensor = _Reachable.apply(tensor.detach(), lead)  # type: ignore[no-untyped-call]
        return value

    return change
