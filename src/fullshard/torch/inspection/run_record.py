# SPDX-License-Identifier: Apache-2.0
"""Records runs: `recording` writes what each rank's steps do, while anybody's loop trains.

[Note: When a record is read]
On a device ops are marked by events of its streams, which nobody asks for while a step goes on.
After an optimizer's step, those of earlier steps that have been reached are read, and the steps
are written. Time goes on from one step's mark to the next, as the device counts in milliseconds of
32 bits. Spans are by the host's clock, and so is everything on a CPU.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.core.errors import CommunicationError, ConfigurationError, UsageError
from fullshard.core.text import bytes_text, in_columns
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.report import Facts, MemoryByOwner, RecordWriter, TimedSpan, record_path
from fullshard.report.files import age_of_process_s
from fullshard.torch.inspection.open_step import OpenStep, RecordTime
from fullshard.torch.inspection.recorded_model import RecordedModel, recorded_model
from fullshard.torch.step.profiling import OpRecorder
from fullshard.torch.unit.unit import Unit

_NAMED = 8  # units


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` says that a device or the host has no memory left."""
    alike = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return alike or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def live_table(rank: int, memory: MemoryByOwner, units: Mapping[str, tuple[int, int]]) -> str:
    """Write what is live on ``rank``, with the units that hold most.

    What the error has passed through was freed by it. ``units`` has the bytes of full parameters
    and of full gradients by name.
    """
    owners = [
        ("parameters, sharded", memory.parameters_bytes),
        ("gradients, sharded", memory.gradients_bytes),
        ("optimizer state", memory.optimizer_bytes),
        ("full parameters of units", memory.gathered_bytes),
        ("full gradients of units", memory.gradient_buffers_bytes),
        ("activations and all else", memory.activations_bytes),
        ("together", memory.total_bytes),
        ("the most so far", memory.peak_bytes),
        ("there is", memory.limit_bytes),
    ]
    rows = [(name, bytes_text(size)) for name, size in owners if size is not None]
    live = in_columns([("live as the error came out", "bytes"), *rows], right=(1,))
    lines = [f"Out of memory on rank {rank}.", live]
    holding = sorted((u for u in units.items() if sum(u[1])), key=lambda u: -sum(u[1]))
    if holding:
        heads: list[tuple[object, ...]] = [("unit", "full parameters", "full gradients")]
        sizes = [(name, *map(bytes_text, held)) for name, held in holding[:_NAMED]]
        more = f"\n(and {len(holding) - _NAMED} more)" if len(holding) > _NAMED else ""
        lines.append(in_columns([*heads, *sizes], right=(1, 2)) + more)
    lines.append("What to change, in which order: fullshard plan, and the page Out of memory.")
    return "\n".join(lines)


T = TypeVar("T")

_DETAILED_AT_FIRST = 3  # the first step gathers on demand, the second as it was recorded
_BETWEEN_SAMPLES_S = 0.005
_being_written: set[Path] = set()
# Spans that count to no step if they come before it.
_OUTSIDE = ("checkpoint", "evaluation", "start")


class _RunRecorder(OpRecorder):
    """An `OpRecorder` that looks at memory where forward or backward of a unit ends."""

    notes_fills = False

    def __init__(self, run: "RunRecording", device: torch.device, units: Iterable[Unit]):
        super().__init__(device, units)
        self._run = run

    def phase_begins(self, what: str) -> None:
        self._run._computes(what)

    def unit_ended(self) -> None:
        self._run._sample(None)


class RunRecording:
    """One rank's record while it is written; `recording` makes it."""

    def __init__(
        self,
        writer: Callable[[Facts], RecordWriter],
        facts: Facts,
        model: RecordedModel,
        optimizers: Sequence[Optimizer],
        detailed_every: int,
    ):
        entered, age_s = time.perf_counter(), age_of_process_s()
        self._zero = entered - age_s  # of the record, by the host's clock
        self._model, self._optimizers, self._every = model, optimizers, detailed_every
        self._writer = writer(replace(facts, started_at=time.time() - age_s))
        self._units = facts.units
        units = model.units if model.counts_buffers else ()
        self._recorder = _RunRecorder(self, model.device, units)
        self._clock = self._recorder.clock
        now_s = self._now_s()
        self._time = RecordTime(self._zero, self._clock, now_s)
        self._sampled_s, self._after_backward, self._fails = 0.0, False, False
        self._rest, self._limit_bytes = model.resting_bytes(optimizers), _limit_bytes(model.device)
        self._recent_s, self._recent_waits_s = 0.0, 0.0
        self._written: deque[OpenStep] = deque()  # by the host, not yet by the device
        started_s = self._time.of(self._clock.start) if self._clock.on_host else now_s
        self._put(self._writer.span, TimedSpan("start", 0.0, started_s))
        self._step = OpenStep(0, self._clock.start)
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
        begin, told_s, outside = self._now_s(), self._told_s(), what in _OUTSIDE
        if outside:
            self._detach()
        try:
            yield
        finally:
            if outside and not self._step.begun:
                self._put(self._writer.span, TimedSpan(what, begin, self._now_s()))
                self._step.begin = self._clock.mark()
            else:
                self._add_span(what, begin, told_s)
            if outside:
                self._prepare()

    def _told_s(self) -> float:
        """Return the seconds of the step that have a name so far."""
        return sum(self._recorder.sums_s.values()) + sum(self._step.spans_s.values())

    def _add_span(self, what: str, begin: float, told_s: float) -> None:
        """Add a span to the step, and its time but for what was named in it."""
        step, now = self._step, self._now_s()
        inside_s = max(0.0, self._told_s() - told_s)
        step.spans.append(TimedSpan(what, begin, now))
        step.spans_s[what] = step.spans_s.get(what, 0.0) + now - begin - inside_s

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
            self._rest = self._model.resting_bytes(self._optimizers)
        self._sample(done.end)
        self._weigh(done)
        done.notes, recorder.notes = recorder.notes, []
        done.sums_s = dict(recorder.sums_s)
        recorder.sums_s.clear()
        self._after_backward = False
        self._written.append(done)
        self._step = OpenStep(done.step + 1, done.end)
        self._prepare()
        self._write(keep=1)

    def follow(self) -> Sequence[Any]:
        """End a step when all optimizers have stepped; return the handles of the hooks."""
        begun: list[tuple[float, float]] = []
        stepped: set[int] = set()

        def begin(*_: Any) -> None:
            begun.append((self._now_s(), self._told_s()))

        def end(optimizer: Optimizer, *_: Any) -> None:
            self._add_span("optimizer", *begun.pop())
            stepped.add(id(optimizer))
            if len(stepped) == len(self._optimizers):
                stepped.clear()
                self.end_step()

        before = [each.register_step_pre_hook(begin) for each in self._optimizers]
        return before + [each.register_step_post_hook(end) for each in self._optimizers]

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
            self._weigh(self._step)
            held = {unit.name: recorder.held(unit) for unit in units}
            *_, memory = self._step.memory(self._time)
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
        if not self._optimizers and what == "forward" and self._after_backward:
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
        full, gradients = recorder.held_bytes
        self._step.samples.append((mark or self._clock.mark(), full, gradients, used))

    def _weigh(self, step: OpenStep) -> None:
        device = self._model.device
        on_device = device.type == "cuda"
        step.rest, step.limit_bytes = self._rest, self._limit_bytes
        step.peak_bytes = (
            torch.cuda.max_memory_allocated(device) if on_device else resident_bytes()[1]
        )

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
            recorded = self._written.popleft().recorded(
                self._time, self._model.numbers, self._units
            )
            self._put(self._writer.step, recorded)
            waits = [s for name, s in recorded.sums_s.items() if name.startswith("await_")]
            if waits:
                self._recent_s += recorded.duration_s
                self._recent_waits_s += sum(waits)

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


@contextmanager
def recording(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    detailed_every: int = 50,
    limit_bytes: int = 32 * 2**20,
    settings: Mapping[str, str | float | bool | None] | None = None,
    forecast: Mapping[str, float] | None = None,
) -> Iterator[RunRecording]:
    """Record within what the steps of ``model`` do on each rank, for ``fullshard report folder``.

    Collective at its begin, where ranks compare their clocks; afterwards each writes a file of its
    own, ``folder/trace/rank-00000.jsonl``, of at most ``limit_bytes``. A step ends when
    ``optimizer`` has stepped, of several when all have; without one, when a forward follows a
    backward. The first steps and
    every ``detailed_every``-th are recorded op by op, of others sums. ``model`` is one that
    fullshard has sharded, by either interface, or by PyTorch's ``fully_shard``, or a plain one;
    the record says what it lacks of these. ``settings`` and ``forecast`` (``step_s``, ...) are
    written beside what is known of the model. A file that is there is gone on with.

    Raises `ConfigurationError` for numbers below 1, settings of other types, what is no optimizer,
    and a folder that cannot be written to, `UsageError` if the model is being recorded already, or
    the file written.
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
    optimizers = _optimizers_of(optimizer)
    recorded = recorded_model(model)
    if any(isinstance(each, _RunRecorder) for each in recorded.recorders):
        raise UsageError("this model is being recorded already")
    facts = recorded.facts(settings or {}, forecast or {})
    path = record_path(folder, facts.rank).resolve()
    if path in _being_written:
        raise UsageError(
            f"{str(path)!r} is being written: give each model that is recorded at the same time a "
            "folder of its own"
        )

    def writer(facts: Facts) -> RecordWriter:
        try:
            return RecordWriter(folder, facts, limit_bytes)
        except OSError as error:
            raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from error

    run = RunRecording(writer, facts, recorded, optimizers, detailed_every)
    _being_written.add(path)
    handles = run.follow()
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
        _being_written.discard(path)
        run.close(ending)


def _optimizers_of(given: Any) -> Sequence[Optimizer]:
    """Return what was given as ``optimizer`` as those of torch; accelerate wraps them."""
    several = given if isinstance(given, list | tuple) else [] if given is None else [given]
    plain: list[Any] = [getattr(each, "optimizer", each) for each in several]
    if wrong := [each for each in plain if not isinstance(each, Optimizer)]:
        raise ConfigurationError(
            f"optimizer must be one of torch.optim, or several in a list, got "
            f"{type(wrong[0]).__name__}; leave it out for another, and call end_step() behind its "
            "steps"
        )
    return plain


def _limit_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_total_bytes()
