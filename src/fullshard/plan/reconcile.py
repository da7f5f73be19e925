# SPDX-License-Identifier: Apache-2.0
"""After a run: what was predicted beside what was measured, by category and by unit."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import bytes_text, in_columns
from fullshard.core.trace import Trace, TraceRecord
from fullshard.plan.memory import MemoryForecast

__all__ = ["Compared", "Measured", "Reconciliation", "UnitCompared", "reconcile"]

_RESTS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Measured:
    """One rank's measurements of a step; None where nothing was measured.

    ``trace`` is that of one micro-batch (`fullshard.torch.tracing`); ``parameters_bytes``,
    ``gradients_bytes`` and ``optimizer_bytes`` rest after a backward
    (`fullshard.torch.resting_bytes`). ``allocated_bytes`` and ``reserved_bytes`` are peaks of the
    allocator, ``device_bytes`` what the driver shows as used, ``step_s`` the seconds of a step.
    """

    trace: Trace
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured (None if it was not)."""

    name: str
    predicted: float
    measured: float | None

    @property
    def difference(self) -> float | None:
        """Measured minus predicted."""
        return None if self.measured is None else self.measured - self.predicted

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        if not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class UnitCompared:
    """The ops on one unit, by kind, and the bytes they were about.

    ``waited_s`` is the measured time in which the step stood still for the unit's gathers and
    reduces, as far as the trace tells: between the op before and the end of the wait.
    """

    unit: str
    predicted_ops: Mapping[str, int]
    measured_ops: Mapping[str, int]
    predicted_bytes: int
    measured_bytes: int
    waited_s: float

    @property
    def agrees(self) -> bool:
        """True if the ops and their bytes are those predicted."""
        same_ops = self.predicted_ops == self.measured_ops
        return same_ops and self.predicted_bytes == self.measured_bytes


@dataclass(frozen=True)
class Reconciliation:
    """Categories and units side by side; ``str()`` is two tables of at most 100 columns.

    ``first_difference`` tells where the order of ops first is another one, None if nowhere.
    """

    categories: tuple[Compared, ...]
    units: tuple[UnitCompared, ...]
    first_difference: str | None
    step: Compared | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        """True if ops agree in their order, and all that rests and all unit buffers to the byte."""
        names = {*_RESTS, "unit buffers"}
        state = (each for each in self.categories if each.name in names)
        return self.first_difference is None and not any(each.difference for each in state)

    def __str__(self) -> str:
        rows: list[Sequence[object]] = [("", "predicted", "measured", "difference", "error")]
        rows += [_row(each) for each in self.categories]
        parts = [in_columns(rows, right=(1, 2, 3, 4))]
        if self.step is not None and self.step.measured is not None:
            error = self.step.error
            parts.append(
                f"step: predicted {self.step.predicted:.4g} s, measured {self.step.measured:.4g} s"
                + ("" if error is None else f" ({error:+.1%})")
            )
        differing = [each for each in self.units if not each.agrees]
        if differing:
            heads = ("unit that differs", "ops predicted", "ops measured", "bytes predicted")
            rows = [(*heads, "bytes measured")]
            for each in differing:
                counts = sum(each.predicted_ops.values()), sum(each.measured_ops.values())
                rows.append((each.unit[:40], *counts, each.predicted_bytes, each.measured_bytes))
            parts.append(in_columns(rows, right=(1, 2, 3, 4)))
        else:
            parts.append(f"all {len(self.units)} units did what was predicted")
        if self.first_difference is not None:
            parts.append(self.first_difference)
        return "\n\n".join([*parts, *self.notes])


def reconcile(
    forecast: MemoryForecast, planned: Trace, measured: Measured, *, step_s: float | None = None
) -> Reconciliation:
    """Compare a forecast, the planned ops and the predicted ``step_s`` with a measured step.

    ``planned`` is of the same micro-batch as the measured trace (`planned_trace`). What the
    allocator has measured beyond model state and unit buffers counts as activations with logits,
    as only their sum can be told from it. Raises `ConfigurationError` for an empty trace.
    """
    if not len(measured.trace):
        raise ConfigurationError(
            "the measured trace is empty; record a step within fullshard.torch.tracing(model)"
        )
    return Reconciliation(
        tuple(_categories(forecast, planned, measured)),
        tuple(_units(planned, measured.trace)),
        _first_difference(planned, measured.trace),
        None if step_s is None else Compared("step", step_s, measured.step_s),
    )


def _categories(forecast: MemoryForecast, planned: Trace, measured: Measured) -> Iterator[Compared]:
    resting, peak = forecast.resting, forecast.peak
    yield Compared("parameters", resting.parameters_bytes, measured.parameters_bytes)
    yield Compared("gradients", resting.gradients_bytes, measured.gradients_bytes)
    yield Compared("optimizer", resting.optimizer_bytes, measured.optimizer_bytes)
    yield Compared("unit buffers", planned.peak_bytes, measured.trace.peak_bytes)
    activations = peak["activations"] + peak["logits and loss"]
    known = forecast.allocated_bytes - activations
    allocated, reserved = measured.allocated_bytes, measured.reserved_bytes
    others = None if allocated is None else allocated - known
    yield Compared("activations and logits", activations, others)
    yield Compared("allocated at the peak", forecast.allocated_bytes, allocated)
    slack = None if allocated is None or reserved is None else reserved - allocated
    yield Compared("allocator slack", peak["allocator slack"], slack)
    yield Compared("reserved at the peak", forecast.reserved_bytes, reserved)
    device = measured.device_bytes
    context = None if device is None or reserved is None else device - reserved
    yield Compared("context and nccl", peak["context and nccl"], context)


def _units(planned: Trace, measured: Trace) -> Iterator[UnitCompared]:
    waited: defaultdict[str, float] = defaultdict(float)
    before = 0.0
    for record in measured:
        if record.op in ("await_gather", "await_reduce"):
            waited[record.unit] += record.at_s - before
        before = record.at_s
    names = dict.fromkeys(record.unit for record in (*planned, *measured))
    for name in names:
        foreseen, foreseen_bytes = _of_unit(planned, name)
        done, done_bytes = _of_unit(measured, name)
        yield UnitCompared(name, foreseen, done, foreseen_bytes, done_bytes, waited[name])


def _of_unit(trace: Trace, name: str) -> tuple[dict[str, int], int]:
    records = [each for each in trace if each.unit == name]
    return dict(Counter(each.op for each in records)), sum(each.bytes for each in records)


def _first_difference(planned: Trace, measured: Trace) -> str | None:
    for number, (foreseen, done) in enumerate(zip_longest(planned, measured), 1):
        if foreseen is None:
            return f"op {number}: nothing more was predicted, but {_told(done)} was done"
        if done is None:
            return f"op {number}: {_told(foreseen)} was predicted, but the trace has ended"
        if (foreseen.op, foreseen.unit) != (done.op, done.unit):
            return f"op {number}: {_told(foreseen)} was predicted, but {_told(done)} was done"
    return None


def _told(record: TraceRecord) -> str:
    return f"{record.op} of {record.unit}"


def _row(each: Compared) -> tuple[str, ...]:
    error = each.error
    return (
        each.name,
        bytes_text(round(each.predicted)),
        "-" if each.measured is None else bytes_text(round(each.measured)),
        "-" if each.difference is None else bytes_text(round(each.difference)),
        "-" if error is None else f"{error:+.1%}",
    )
