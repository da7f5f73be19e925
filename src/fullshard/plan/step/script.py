# SPDX-License-Identifier: Apache-2.0
"""A training step as one list: what the model computes, and the engine's ops between.

Memory and time are both read off this list. The ops are those of `fullshard.core.schedule`, asked
as the engine asks it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from fullshard.core.grouping import deepest_around
from fullshard.core.schedule import Event, Moment, Op, OpKind, compile_step
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.operations import Model, ModelCall
from fullshard.plan.run import ONE_BY_ONE, Run
from fullshard.plan.step.units import PlannedUnit, units_of


class Pass(Enum):
    """The direction of a call that is computed."""

    FORWARD = "forward"
    AGAIN = "again"  # forward, recomputed in backward
    BACKWARD = "backward"


@dataclass(frozen=True)
class Act:
    """One call's forward or backward; ``unit`` is the number of the deepest unit around it."""

    phase: Pass
    call: int
    unit: int


class ActMemory(NamedTuple):
    """Measured memory of one act: bytes of activations and of logits and loss.

    ``peak`` is what both hold beyond what they held before, at the moment when their sum is
    largest; ``change`` what they hold more (or less) afterwards. ``gives`` is the index, in the
    unit of the act, of the parameter whose gradient is handed over when it begins.
    """

    peak: tuple[int, int]
    change: tuple[int, int]
    gives: int | None = None


@dataclass(frozen=True)
class Script:
    """One micro-batch of a step: ``lines`` are acts and ops in the order in which they start.

    ``events`` are what the engine's hooks report. ``blocks[n]`` is the block of call n, if any. A
    model that was measured has ``stretches``: call n then stands for one act alone, whose memory is
    that of stretch n, and whose work is the same whichever phase the act has. ``buffers_bytes``
    are those of the modules' buffers, which no unit has.
    """

    units: tuple[PlannedUnit, ...]
    calls: tuple[ModelCall, ...]
    blocks: tuple[int | None, ...]
    events: tuple[Event, ...]
    lines: tuple[Act | Op, ...]
    stretches: tuple[ActMemory, ...] = ()
    buffers_bytes: int = 0


@dataclass(frozen=True)
class Walk:
    """The events and acts of a step of a measured model, in order."""

    calls: tuple[ModelCall, ...]
    stretches: tuple[ActMemory, ...]
    walked: tuple[Event | Act, ...]
    buffers_bytes: int = 0


@runtime_checkable
class Walked(Protocol):
    """A model that was measured, and so knows itself what happens between the units' events."""

    def walk(self, units: Sequence[PlannedUnit], run: Run) -> Walk:
        """The step with events for ``units``."""


def offloaded_bytes(script: Script, run: Run) -> int:
    """Bytes that blocks keep for backward in the host's memory, if ``run`` offloads activations."""
    if not run.offload_activations:
        return 0
    return sum(
        call.input_bytes
        if run.recomputed(block)
        else sum(each.saved_bytes for each in call.operations)
        for call, block in zip(script.calls, script.blocks, strict=True)
        if block is not None
    )


def write_script(
    model: Model,
    run: Run,
    cluster: Cluster,
    *,
    reduces: bool = True,
    units: tuple[PlannedUnit, ...] | None = None,
) -> Script:
    """Write one forward and backward of ``model`` down, with every unit's ops.

    ``reduces`` is false for a micro-batch whose gradients stay full until a later one's. ``units``
    are those of `units_of`, if they are known from another run that differs only in its batch.
    """
    if units is None:
        units = units_of(model, run, cluster, reduces=reduces)
    if isinstance(model, Walked):
        walk = model.walk(units, run)
    else:
        calls = model.calls(run)
        owners = [number or 0 for number in _numbers_of(calls, [unit.path for unit in units])]
        in_blocks = _numbers_of(calls, model.blocks)
        walk = Walk(calls, (), tuple(_walk(calls, in_blocks, owners, units, run)))
    events = [each for each in walk.walked if isinstance(each, Event)]
    policies = {number: each.policy for number, each in enumerate(units)}
    prefetch = run.prefetch
    if run.experts in ONE_BY_ONE:  # the host, which waits for these, is not ahead
        prefetch = replace(prefetch, forward=0)
    compiled = compile_step(events, policies, prefetch)
    ops = iter(_as_carried_out(compiled, units))
    lines: list[Act | Op] = []
    for each in walk.walked:
        if isinstance(each, Event):
            lines += next(ops)
        else:
            lines.append(each)
    return Script(
        units,
        walk.calls,
        tuple(_numbers_of(walk.calls, model.blocks)),
        tuple(events),
        tuple(lines),
        walk.stretches,
        walk.buffers_bytes,
    )


def _as_carried_out(
    compiled: Iterable[Sequence[Op]], units: Sequence[PlannedUnit]
) -> Iterator[list[Op]]:
    """Yield the ops of each event as the engine carries them out.

    A unit that nobody shares has nothing to wait for: its gradients are delivered at once.
    """
    alone = {
        number
        for number, unit in enumerate(units)
        if unit.cost.solo and not unit.cost.all_reduce_bytes
    }
    for ops in compiled:
        done = [op for op in ops if not (op.kind is OpKind.AWAIT_REDUCE and op.unit in alone)]
        reduced = [op.unit for op in done if op.kind is OpKind.REDUCE and op.unit in alone]
        yield done + [Op(OpKind.AWAIT_REDUCE, unit) for unit in reduced]


def _numbers_of(calls: Sequence[ModelCall], paths: Sequence[str]) -> list[int | None]:
    """Number for each call the deepest of ``paths`` that it lies in."""
    numbers = {path: number for number, path in enumerate(paths)}

    def number_of(path: str) -> int | None:
        deepest = path if path in numbers else deepest_around(path, numbers)
        return None if deepest is None else numbers[deepest]

    return [number_of(call.path) for call in calls]


def _walk(
    calls: Sequence[ModelCall],
    blocks: Sequence[int | None],
    owners: Sequence[int],
    units: Sequence[PlannedUnit],
    run: Run,
) -> Iterator[Event | Act]:
    """Events and acts of forward, backward and the end, in order."""
    chains = [_chain(owner, units) for owner in owners]
    inside: list[int] = []
    for number, chain in enumerate(chains):
        yield from _move(inside, chain, Moment.FORWARD_BEGIN, Moment.FORWARD_END)
        yield Act(Pass.FORWARD, number, owners[number])
    yield from _move(inside, [], Moment.FORWARD_BEGIN, Moment.FORWARD_END)
    number = len(calls) - 1
    while number >= 0:
        block = blocks[number]
        first = number
        while block is not None and first and blocks[first - 1] == block:
            first -= 1
        span = range(first, number + 1)
        if block is not None and run.recomputed(block):
            outer = _common(chains[first], chains[number])
            yield from _move(inside, outer, Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)
            again = list(outer)
            for each in span:
                yield from _move(again, chains[each], Moment.FORWARD_BEGIN, Moment.FORWARD_END)
                yield Act(Pass.AGAIN, each, owners[each])
            yield from _move(again, outer, Moment.FORWARD_BEGIN, Moment.FORWARD_END)
        for each in reversed(span):
            chain = chains[each]
            yield from _move(inside, chain, Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)
            yield Act(Pass.BACKWARD, each, owners[each])
        number = first - 1
    yield from _move(inside, [], Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)
    yield Event(Moment.STEP_END)


def _chain(unit: int, units: Sequence[PlannedUnit]) -> list[int]:
    """The units around a call, the outermost first."""
    chain = [unit]
    while (around := units[chain[0]].around) is not None:
        chain.insert(0, around)
    return chain


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    both = zip(one, other, strict=False)
    return [a for a, b in both if a == b]


def _move(inside: list[int], to: Sequence[int], begin: Moment, end: Moment) -> Iterator[Event]:
    """Leave the units that are not around the next call, and enter those that are."""
    same = len(_common(inside, to))
    while len(inside) > same:
        yield Event(end, inside.pop())
    for unit in to[same:]:
        inside.append(unit)
        yield Event(begin, unit)
