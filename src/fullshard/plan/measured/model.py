# SPDX-License-Identifier: Apache-2.0
"""A model made of recordings of its step."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.core.schedule import Event, Moment
from fullshard.core.spec import ModelSpec
from fullshard.plan.measured.feeder import RecordingFeeder
from fullshard.plan.measured.recording import (
    MarkKind,
    MemoryUse,
    RecordedOp,
    StepMark,
    StepRecording,
)
from fullshard.plan.model.operations import Kind, ModelCall, Operation, Workload
from fullshard.plan.run import Run
from fullshard.plan.step.script import Act, ActMemory, Pass, Walk
from fullshard.plan.step.units import PlannedUnit


@dataclass(frozen=True)
class MeasuredModel:
    """Any model, by what one forward and backward of it did.

    ``record`` gives the recording for a run: of its micro-batch, its dtype of computation and what
    it recomputes. ``blocks`` and ``parts`` are paths of modules, as of every model. ``samples`` is
    the micro-batch that was recorded.
    """

    name: str
    blocks: tuple[str, ...]
    parts: tuple[str, ...]
    record: Callable[[Run], StepRecording]
    context: int = 1
    experts: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, name: str, recording: StepRecording, blocks: Sequence[str], parts: Sequence[str] = ()
    ) -> "MeasuredModel":
        """A model of which there is one recording, good for runs that compute in its dtype.

        Raises `ConfigurationError` for a path in ``blocks`` or ``parts`` of no module that ran.
        """
        ran = {call.module for call in recording.calls}
        for path in (*blocks, *parts):
            if path not in ran:
                near = difflib.get_close_matches(path, ran, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigurationError(f"{name} ran no module {path!r}{hint}")

        def record(run: Run) -> StepRecording:
            wanted = run.precision.compute
            if recording.compute_dtype not in (None, wanted):
                raise ConfigurationError(
                    f"{name} was recorded in {recording.compute_dtype}, but the run computes in "
                    f"{wanted or 'the dtype in which parameters rest'}; record it once more"
                )
            return recording

        return cls(name, tuple(blocks), tuple(parts), record)

    def spec(self, run: Run) -> ModelSpec:
        """See `fullshard.plan.model.operations.Model.spec`."""
        return ModelSpec(self.record(run).params)

    def calls(self, run: Run) -> tuple[ModelCall, ...]:
        """The whole step as one call: what a unit needs of it is told by `walk`."""
        recording = self.record(run)
        return (ModelCall("", tuple(map(_operation, recording.ops))),)

    def model_flops(self, run: Run) -> float:
        """All that the recorded step computes, by sample; what is recomputed is in it."""
        return self.record(run).flops / run.micro_batch

    def walk(self, units: Sequence[PlannedUnit], run: Run) -> Walk:
        """The recorded step with events for ``units``."""
        recording = self.record(run)
        writer = _WalkWriter(recording)
        feeder = RecordingFeeder(recording, units)
        for happening in feeder:
            if isinstance(happening, Event):
                writer.event(happening)
            else:
                writer.mark(happening, feeder)
        return writer.written()


def _operation(op: RecordedOp) -> Operation:
    kind = Kind.MEMORY
    if op.flops:
        kind = Kind.ATTENTION if "attention" in op.name else Kind.MATMUL
    work = Workload(op.flops, op.bytes)
    return Operation(op.name, kind, work, work)


class _WalkWriter:
    """Cuts a recording into acts: where events are, and where gradients come."""

    def __init__(self, recording: StepRecording):
        self._recording = recording
        self._calls: list[ModelCall] = []
        self._stretches: list[ActMemory] = []
        self._walked: list[Event | Act] = []
        self._inside: list[int] = []  # units, the innermost last
        self._in_backward = self._again = False
        self._begin()

    def _begin(self, gives: tuple[int, int] | None = None) -> None:
        self._operations: list[Operation] = []
        self._path = ""
        self._held = [0, 0]
        # A gradient that is handed over is its unit's, and released here before anything else.
        self._peak: tuple[int, int] | None = None if gives else (0, 0)
        self._touched = gives is not None
        self._gives = gives

    def event(self, event: Event) -> None:
        """An event ends the act before it."""
        self._end()
        self._walked.append(event)
        moment, unit = event
        if moment in (Moment.FORWARD_BEGIN, Moment.BACKWARD_BEGIN):
            self._inside.append(unit)
            self._in_backward |= moment is Moment.BACKWARD_BEGIN
            self._again = self._in_backward and moment is Moment.FORWARD_BEGIN
        elif moment is not Moment.STEP_END:
            if unit in self._inside:
                self._inside.remove(unit)
            self._again = False

    def mark(self, mark: StepMark, feeder: RecordingFeeder) -> None:
        """Take up what happened to memory, and what was computed."""
        kind, number = mark
        if kind is MarkKind.ALLOCATE or kind is MarkKind.RELEASE:
            size, use = self._recording.blocks[number]
            self._held[use is MemoryUse.LOGITS_AND_LOSS] += (
                size if kind is MarkKind.ALLOCATE else -size
            )
            if self._peak is None or sum(self._held) > sum(self._peak):
                self._peak = self._held[0], self._held[1]
            self._touched = True
        elif kind is MarkKind.OP:
            op = self._recording.ops[number]
            self._operations.append(_operation(op))
            self._path = self._path or op.module
            self._touched = True
        elif kind is MarkKind.GRADIENT:
            place = feeder.place_of(number)
            if place is not None:
                self._end()
                self._begin(gives=place)

    def _end(self) -> None:
        if self._touched:
            unit = self._inside[-1] if self._inside else 0
            phase = Pass.BACKWARD if self._in_backward else Pass.FORWARD
            phase = Pass.AGAIN if self._again else phase
            gives = None
            if self._gives is not None:
                unit, gives = self._gives
            self._walked.append(Act(phase, len(self._calls), unit))
            self._calls.append(ModelCall(self._path, tuple(self._operations)))
            change = self._held[0], self._held[1]
            self._stretches.append(ActMemory(self._peak or (0, 0), change, gives))
        self._begin()

    def written(self) -> Walk:
        """All of it, when the recording is over."""
        self._end()
        return Walk(
            tuple(self._calls),
            tuple(self._stretches),
            tuple(self._walked),
            self._recording.buffers_bytes,
        )
