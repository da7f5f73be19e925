# SPDX-License-Identifier: Apache-2.0
"""Records runs: `recording` writes what each rank's steps do, while anybody's loop trains.

[Note: When a record is read]
On a device ops are marked by events of its streams, which nobody asks for while a step goes on.
After an optimizer's step, those of earlier steps that have been reached are read, and the steps
are written. Time goes on from one step's mark to the next, as the device counts in milliseconds of
32 bits. Spans are by the host's clock, and so is everything on a CPU.
"""

import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.core.errors import CommunicationError, ConfigurationError, UsageError
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.report import (
    Facts,
    MemoryByOwner,
    RecordedStep,
    RecordWriter,
    TimedOp,
    TimedOps,
    TimedSpan,
    record_path,
)
from fullshard.torch.inspection.last_words import is_out_of_memory, live_table
from fullshard.torch.inspection.memory_summary import Bytes
from fullshard.torch.inspection.recorded_model import RecordedModel, recorded_model
from fullshard.torch.step.profiling import NotedOp, OpRecorder
from fullshard.torch.unit.unit import Unit

__all__ = ["RunRecording", "recording"]

T = TypeVar("T")

_DETAILED_AT_FIRST = 3  # the first step gathers on demand, the second as it was recorded
_BETWEEN_SAMPLES_S = 0.005
_OUTSIDE = (
    "checkpoint",
    "evaluation",
    "start",
)  # spans that count to no step if they come before it
_ENDS = {  # the op that ends a collective
    "gather": ("await_gather",),
    "reduce": ("all_reduce", "await_reduce"),
    "all_reduce": ("await_reduce",),
}


@dataclass
class _OpenStep:
    """A step that is going on, or of which the device has not reached the end."""

    step: int
    begin: Any
    tokens: int | None = None
    loss: float | Tensor | None = None
    end: Any = None
    detailed: bool = False
    begun: bool = False  # something of it was computed
    notes: list[NotedOp] = field(default_factory=list)
    sums_s: dict[str, float] = field(default_factory=dict)
    spans: list[TimedSpan] = field(default_factory=list)
    samples: list[tuple[Any, int, int, int | None]] = field(default_factory=list)
    rest: Bytes = field(default_factory=lambda: Bytes(0, 0, 0))
    peak_bytes: int | None = None


class _RunRecorder(OpRecorder):
    """An `OpRecorder` that looks at memory where forward or backward of a unit ends."""

    notes_fills = False
    sample: Callable[[Any], None] | None = None
    computes: Callable[[str], None] | None = None

    def mark(self) -> Any:
        """Mark this moment; an event costs too much where it is not kept."""
        return self.clock.mark() if self.detailed or self.clock.on_host else None

    def begins(self, what: str, unit: Any) -> None:
        if self._phase is None and self.computes is not None:
            self.computes(what)
        super().begins(what, unit)

    def ends(self, what: str, unit: Any) -> None:
        if self.detailed and isinstance(unit, Unit):
            self.weigh(unit)
        super().ends(what, unit)
        if self.detailed and self.sample is not None:
            self.sample(None)


class RunRecording:
    """One rank's record while it is written; `recording` makes it."""

    def __init__(
        self,
        writer: Callable[[Facts], RecordWriter],
        facts: Facts,
        model: RecordedModel,
        optimizer: Optimizer | None,
        detailed_every: int,
    ):
        entered, age_s = time.perf_counter(), _age_of_process_s()
        self._zero = entered - age_s  # of the record, by the host's clock
        self._model, self._optimizer, self._every = model, optimizer, detailed_every
        self._writer = writer(replace(facts, started_at=time.time() - age_s))
        self._recorder = _RunRecorder(model.device, model.units if model.counts_buffers else ())
        self._recorder.sample, self._recorder.computes = self._sample, self._computes
        self._clock = self._recorder.clock
        self._from: Any = self._clock.start  # the mark from which the device's time goes on
        self._at_s = self._now_s()
        if self._clock.on_host:
            self._at_s = self._seconds(self._from)
        self._sampled_s, self._after_backward, self._fails = 0.0, False, False
        self._rest, self._limit_bytes = model.resting_bytes(optimizer), _limit_bytes(model.device)
        self._recent_s, self._recent_waits_s = 0.0, 0.0
        self._written: deque[_OpenStep] = deque()  # by the host, not yet by the device
        self._put(self._writer.span, TimedSpan("start", 0.0, self._at_s))
        self._step = _OpenStep(0, self._from)
        if model.watchdog is not None:
            model.watchdog.listeners.append(self._leave_waits)
        self._prepare()

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._writer.path

    @property
    def step(self) -> int:
        """The number of the present step; the first is 0."""
        return self._step.step

    def take_recent(self) -> tuple[float, float]:
        """Return the seconds of steps since the last call, and those in which they waited.

        Of steps that have been written, and of which both are known: on a device, detailed ones.
        """
        recent = self._recent_s, self._recent_waits_s
        self._recent_s = self._recent_waits_s = 0.0
        return recent

    def goes_on_from(self, step: int) -> None:
        """Number the present step ``step``: a run goes on from a checkpoint."""
        self._step.step = step
        self._prepare()

    def note(self, *, loss: float | Tensor | None = None, tokens: int | None = None) -> None:
        """Note a loss, and the tokens of all ranks together, for the step that runs or has ended.

        A loss on a device is read later; nothing waits for it. Raises `ConfigurationError` for a
        loss of several elements, and for tokens below 0.
        """
        if (isinstance(loss, Tensor) and loss.numel() != 1) or (tokens is not None and tokens < 0):
            raise ConfigurationError(
                f"note takes a loss of one element and tokens of at least 0, got {loss}, {tokens}"
            )
        step = self._step
        if not step.begun and self._written:
            step = self._written[-1]
        if isinstance(loss, Tensor) and loss.device.type == "cuda":
            there = torch.empty_like(loss, device="cpu", pin_memory=True, requires_grad=False)
            loss = there.copy_(loss.detach(), non_blocking=True)
        elif loss is not None:
            loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        step.loss = step.loss if loss is None else loss
        step.tokens = step.tokens if tokens is None else int(tokens)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Note the time within as "data", "checkpoint", "evaluation", ... or any other word.

        Units are not recorded in checkpoints and evaluations. One of these that comes before
        anything of a step was computed belongs to no step.
        """
        begin, outside = self._now_s(), what in _OUTSIDE
        if outside:
            self._detach()
        try:
            yield
        finally:
            span = TimedSpan(what, begin, self._now_s())
            if outside and not self._step.begun:
                self._put(self._writer.span, span)
                self._step.begin = self._clock.mark()
            else:
                self._step.spans.append(span)
            if outside:
                self._prepare()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield from ``batches``; the time that they need is noted as "data"."""
        iterator = iter(batches)
        while True:
            try:
                with self.span("data"):
                    batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def end_step(self) -> None:
        """End the present step; called by the hooks of the optimizer, where there is one."""
        done, recorder = self._step, self._recorder
        done.end = self._clock.mark()
        if done.detailed and self._model.counts_buffers:
            for unit in self._model.units:
                recorder.weigh(unit)
        if done.step < _DETAILED_AT_FIRST:
            self._rest = self._model.resting_bytes(self._optimizer)
        self._sample(done.end)
        done.rest, done.peak_bytes = self._rest, self._peak_bytes()
        done.notes, recorder.notes = recorder.notes, []
        done.sums_s = dict(recorder.sums_s)
        recorder.sums_s.clear()
        self._after_backward = False
        self._written.append(done)
        self._step = _OpenStep(done.step + 1, done.end)
        self._prepare()
        self._write(keep=1)

    def follow(self, optimizer: Optimizer) -> Sequence[Any]:
        """End steps with those of ``optimizer``; return the handles of the hooks."""
        begun: list[float] = []

        def begin(*_: Any) -> None:
            begun.append(self._now_s())

        def end(*_: Any) -> None:
            self._step.spans.append(TimedSpan("optimizer", begun.pop(), self._now_s()))
            self.end_step()

        hooks = optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)
        return hooks

    def explain(self, error: BaseException) -> None:
        """Leave what an error tells: who waits where, or what was live as memory ran out."""
        if isinstance(error, CommunicationError):
            self._leave_waits(str(error))
        elif is_out_of_memory(error):
            recorder, units = self._recorder, self._model.units
            if self._model.counts_buffers:
                for unit in units:
                    recorder.weigh(unit)
            self._sampled_s = 0.0
            self._sample(self._clock.mark())
            step = replace(self._step, rest=self._rest, peak_bytes=self._peak_bytes())
            held = {unit.name: recorder.held(unit) for unit in units}
            memory = self._memory(step, *step.samples[-1])
            text = live_table(self._writer.rank, memory, held)
            error.add_note(text)
            self._put(self._writer.leave, "memory", text)

    def _leave_waits(self, text: str) -> None:
        self._put(self._writer.leave, "waits", text)

    def close(self, ending: str) -> None:
        """Write what is left, and stop recording."""
        if self._model.watchdog is not None:
            self._model.watchdog.listeners.remove(self._leave_waits)
        self._detach()
        self._write(keep=0, wait=True)
        self._put(self._writer.end, self._now_s(), ending)

    # ---- while a step runs ----------------------------------------------------------------------

    def _prepare(self) -> None:
        step = self._step
        step.detailed = step.step % self._every == 0 or step.step < _DETAILED_AT_FIRST
        self._recorder.detailed = step.detailed = step.detailed and self._writer.detailed
        self._recorder.forget()
        self._model.attach(self._recorder)

    def _detach(self) -> None:
        self._model.detach(self._recorder)
        self._recorder.forget()

    def _computes(self, what: str) -> None:
        """Something is computed that belongs to the present step, or begins the next one."""
        if self._optimizer is None and what == "forward" and self._after_backward:
            self.end_step()
        self._after_backward |= what == "backward"
        self._step.begun = True

    def _sample(self, mark: Any) -> None:
        now = time.perf_counter()
        if mark is None and now - self._sampled_s < _BETWEEN_SAMPLES_S:
            return
        self._sampled_s, device, recorder = now, self._model.device, self._recorder
        if device.type == "cuda":
            used: int | None = torch.cuda.memory_allocated(device)
        else:
            used = resident_bytes()[0]
        held = recorder.gathered_bytes, recorder.gradient_buffers_bytes
        self._step.samples.append((mark or self._clock.mark(), *held, used))

    def _peak_bytes(self) -> int:
        device = self._model.device
        if device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(device))
        return resident_bytes()[1]

    def _now_s(self) -> float:
        return time.perf_counter() - self._zero

    # ---- afterwards -----------------------------------------------------------------------------

    def _write(self, *, keep: int, wait: bool = False) -> None:
        """Write steps that the device has done, but the newest; see [Note: When a record is read].

        The newest may get its loss still.
        """
        while len(self._written) > keep:
            step = self._written[0]
            if not (wait or isinstance(step.end, float) or step.end.query()):
                return
            self._put(self._writer.step, self._as_record(self._written.popleft()))

    def _as_record(self, step: _OpenStep) -> RecordedStep:
        self._at_s, self._from = self._seconds(step.begin), step.begin
        ops = self._timed(step.notes) if step.detailed else None
        sums = step.sums_s or _sums_of(ops or ())
        end_s = self._seconds(step.end)
        if sums:
            self._recent_s += end_s - self._at_s
            self._recent_waits_s += sum(s for name, s in sums.items() if name.startswith("await_"))
        for span in step.spans:
            sums[span.what] = sums.get(span.what, 0.0) + span.end_s - span.begin_s
        return RecordedStep(
            step.step,
            self._at_s,
            end_s,
            step.tokens,
            None if step.loss is None else float(step.loss),
            {name: max(0.0, seconds) for name, seconds in sums.items()},
            tuple(step.spans),
            tuple(self._memory(step, *sample) for sample in step.samples),
            ops,
        )

    def _put(self, write: Callable[..., None], *what: Any) -> None:
        """Write; where that is impossible warn, once, and let the training go on."""
        if self._fails:
            return
        try:
            write(*what)
        except OSError as error:
            self._fails = True
            warnings.warn(
                f"cannot write {str(self.path)!r}, so the record ends: {error}", stacklevel=2
            )

    def _seconds(self, mark: Any) -> float:
        """Return the time of a mark in the record."""
        if isinstance(mark, float):
            return mark - self._zero
        return self._at_s + self._clock.elapsed_s(self._from, mark)

    def _timed(self, notes: Iterable[NotedOp]) -> TimedOps:
        """Give ops their times: what is issued ends when it was awaited."""
        numbers = {unit: number for number, unit in enumerate(self._model.units)}
        ops: list[TimedOp] = []
        open_ops: dict[tuple[int, str], int] = {}
        for note in notes:
            unit, waiter = numbers[note.unit], numbers.get(note.waiter)
            begin, end = self._seconds(note.begin), self._seconds(note.end)
            for started, ending in _ENDS.items():
                if note.op in ending and (unit, started) in open_ops:
                    place = open_ops.pop((unit, started))
                    ops[place] = TimedOp(*ops[place][:3], end, *ops[place][4:])
            sizes = note.bytes, note.live_bytes
            if note.op == "all_reduce":  # the sum over slices was waited for, then it was issued
                ops.append(TimedOp("await_reduce", unit, begin, end, *sizes, waiter))
                begin, waiter = end, None
            if note.op in _ENDS:
                open_ops[unit, note.op] = len(ops)
                waiter = None
            ops.append(TimedOp(note.op, unit, begin, max(begin, end), *sizes, waiter))
        return TimedOps.of(ops)

    def _memory(
        self, step: _OpenStep, mark: Any, gathered: int, gradients: int, used: int | None
    ) -> MemoryByOwner:
        rest = step.rest
        return MemoryByOwner(
            self._seconds(mark),
            rest.parameters_bytes,
            rest.gradients_bytes,
            rest.optimizer_bytes,
            gathered,
            gradients,
            used,
            step.peak_bytes,
            self._limit_bytes,
        )


@contextmanager
def recording(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    detailed_every: int = 50,
    limit_bytes: int = 32 * 2**20,
    settings: Mapping[str, str | float | bool | None] | None = None,
    forecast: Mapping[str, float] | None = None,
) -> Iterator[RunRecording]:
    """Record within what the steps of ``model`` do on each rank, for ``fullshard report folder``.

    Collective at its begin, where ranks compare their clocks; afterwards each writes a file of its
    own, ``folder/trace/rank-00000.jsonl``, of at most ``limit_bytes``. A step ends when
    ``optimizer`` has stepped; without one, when a forward follows a backward. The first steps and
    every ``detailed_every``-th are recorded op by op, of others sums. ``model`` is one that
    fullshard has sharded, by either interface, or by PyTorch's ``fully_shard``, or a plain one;
    the record says what it lacks of these. ``settings`` and ``forecast`` (``step_s``, ...) are
    written beside what is known of the model. A file that is there is gone on with.

    Raises `ConfigurationError` for numbers below 1, settings of other types, and a folder that
    cannot be written to, `UsageError` if the model is being recorded already.
    """
    for name, value, least in (
        ("detailed_every", detailed_every, 1),
        ("limit_bytes", limit_bytes, 2**16),
    ):
        if type(value) is not int or value < least:
            raise ConfigurationError(f"{name} must be an integer of at least {least}, got {value}")
    for name, setting in (settings or {}).items():
        if not isinstance(setting, str | int | float | None):
            raise ConfigurationError(
                f"settings[{name!r}] must be text, a number, a truth value or None, got {setting!r}"
            )
    recorded = recorded_model(model)
    if any(isinstance(each, _RunRecorder) for each in recorded.recorders):
        raise UsageError("this model is being recorded already")
    facts = recorded.facts(settings or {}, forecast or {})

    def writer(facts: Facts) -> RecordWriter:
        try:
            return RecordWriter(folder, facts, limit_bytes)
        except OSError as error:
            path = record_path(folder, facts.rank)
            raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from error

    run = RunRecording(writer, facts, recorded, optimizer, detailed_every)
    handles = () if optimizer is None else run.follow(optimizer)
    ending = "finished"
    try:
        yield run
    except BaseException as error:
        ending = f"{type(error).__name__}: {error}".partition("\n")[0]
        run.explain(error)
        raise
    finally:
        for handle in handles:
            handle.remove()
        run.close(ending)


def _limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_total_bytes()


def _sums_of(ops: Iterable[TimedOp]) -> dict[str, float]:
    """Add up the waits of a device, whose times are known late."""
    sums: dict[str, float] = {}
    for op in ops:
        if op.op.startswith("await_"):
            sums[op.op] = sums.get(op.op, 0.0) + op.end_s - op.begin_s
    return sums


def _age_of_process_s() -> float:
    """Return the seconds since this process was started, where the system says it."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
    return max(0.0, age_s)
