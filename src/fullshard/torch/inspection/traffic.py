# SPDX-License-Identifier: Apache-2.0
"""The bytes that a rank sends in a step, forecast from layouts or counted from a trace."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.forecast import Sent, UnitCost
from fullshard.core.schedule import OF_PARAMETERS, OpKind
from fullshard.core.text import bytes_text, in_columns
from fullshard.core.trace import Trace, TraceRecord
from fullshard.torch.inspection.forecast import NamedUnit, cost_of, forecast_step, named_units
from fullshard.torch.step.managed import managed_units
from fullshard.torch.step.profiling import OpRecorder
from fullshard.torch.step.tracker import Tracker, ensure_tracker, tracker_of

_HEADS = ("unit", "gather in forward", "gather in backward", "reduce", "all-reduce", "total")


@dataclass(frozen=True)
class Counted:
    """The calls of each collective in a trace, and their bytes.

    An all-reduce over replicas follows its unit's reduce, so there is no number of its own.
    """

    gathers: int
    gather_bytes: int
    reduces: int
    reduce_bytes: int
    all_reduce_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all collectives."""
        return self.gather_bytes + self.reduce_bytes + self.all_reduce_bytes


@dataclass(frozen=True)
class Communication:
    """Bytes that this rank sends in one step, unit by unit; ``str()`` is a table.

    ``not_counted`` names the units whose gathers or reduces a user's own function does.
    """

    units: Mapping[str, Sent]
    not_counted: tuple[str, ...] = ()
    counted: Counted | None = None

    @property
    def total(self) -> Sent:
        """The sum over all units."""
        return sum(self.units.values(), Sent())

    @property
    def total_bytes(self) -> int:
        """The bytes of everything that is sent in the step."""
        return self.total.total_bytes

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [_HEADS]
        for name, sent in [*self.units.items(), ("all units", self.total)]:
            rows.append((name, *astuple(sent), sent.total_bytes))
        lines = ["bytes that this rank sends in a step", in_columns(rows, right=range(1, 6))]
        if self.not_counted:
            names = ", ".join(self.not_counted)
            lines.append(f"not counted, as functions of yours do it: {names}")
        if self.counted is not None:
            each = self.counted
            lines.append(
                f"in the trace: {each.gathers} gathers {bytes_text(each.gather_bytes)}, "
                f"{each.reduces} reduces {bytes_text(each.reduce_bytes)}, "
                f"all-reduces {bytes_text(each.all_reduce_bytes)}"
            )
        return "\n".join(lines)


def communication(model: nn.Module, trace: Trace | None = None) -> Communication:
    """Forecast the bytes that this rank sends in a forward and backward, with present settings.

    Within ``no_sync()`` that is a micro-batch without reduces; outside, one with them. The forecast
    is for a step that runs each unit once, follows an optimizer's step, and is not the very first;
    frozen units before the first trained one are assumed to have no backward. Over N ranks a gather
    of b bytes of full parameters (in the dtype of computation) sends b (N-1)/N, and so does a
    reduce of b bytes of full gradients (in the dtype of the reduce). The all-reduce of a slice s
    over R replicas sends 2 s (R-1)/R, as a ring does. Norms, votes on uneven inputs, tensor
    parallelism, and collectives that users call are not included; parameters with
    ``fsdp_pre_all_gather`` count as plain ones. A model without units sends nothing.

    With the trace of a step (``with tracing(model) as trace``) the recorded calls are counted
    beside the forecast, at present prices. Not collective.

    Raises:
        ConfigurationError: if the trace has units that ``model`` lacks.
    """
    units = named_units(model)
    own = [
        each.name
        for each in units
        if each.unit.settings.hook or each.unit.settings.reduce_scatter or each.unit.custom_gather
    ]
    return Communication(
        forecast_step(units).sent,
        tuple(own),
        None if trace is None else _count(units, trace),
    )


def _count(units: Sequence[NamedUnit], trace: Trace) -> Counted:
    costs = {each.unit.name: cost_of(each.unit) for each in units}
    shrunk: set[str] = set()
    gathers, reduces, gather_bytes = 0, 0, 0
    reduced = Sent()
    for record in trace:
        cost = _cost_in(costs, record.unit)
        if record.op == OpKind.GATHER.value:
            gathers += 1
            gather_bytes += cost.part_gather_bytes if record.unit in shrunk else cost.gather_bytes
        elif record.op == OpKind.REDUCE.value:
            reduces += 1
            reduced += Sent(0, 0, cost.reduce_bytes, cost.all_reduce_bytes)
        elif record.op == OpKind.SHRINK.value:
            shrunk.add(record.unit)
            continue
        if record.op in (OpKind.GATHER.value, OpKind.FREE.value):
            shrunk.discard(record.unit)
    return Counted(gathers, gather_bytes, reduces, reduced.reduce_bytes, reduced.all_reduce_bytes)


def _cost_in(costs: Mapping[str, UnitCost], name: str) -> UnitCost:
    if name not in costs:
        raise ConfigurationError(
            f"the trace has a unit {name!r}, which this model lacks; its units are "
            f"{', '.join(map(repr, costs)) or 'none: it is not sharded'}"
        )
    return costs[name]


@contextmanager
def tracing(model: nn.Module) -> Iterator[Trace]:
    """Record the ops of the steps of ``model``; the trace is filled when the context is left.

    Enter and leave it between steps. Of a part of a larger model that has run already, the steps of
    the whole are recorded. On CUDA, times are those of the compute stream.

    Raises:
        UsageError: if ``model`` holds no unit, is being traced already, or has parts that have
            steps of their own.
    """
    executor = tracker_to_record(model).executor
    if any(type(recorder) is OpRecorder for recorder in executor.recorders):
        raise UsageError("this model is being traced already")
    trace, units = Trace(), [managed.unit for managed in executor.units]
    recorder = OpRecorder(units[0].device, units)
    executor.attach(recorder)
    try:
        yield trace
    finally:
        executor.detach(recorder)
        clock = recorder.clock
        for op, unit, _, end, live, _ in recorder.notes:
            if op not in ("forward", "backward"):
                at_s, layout = clock.elapsed_s(clock.start, end), unit.layout
                size = layout.full_bytes if op in OF_PARAMETERS else layout.grad_full_bytes
                trace.records.append(TraceRecord(op, unit.name, at_s, size, live))


def tracker_to_record(model: nn.Module) -> Tracker:
    """Return what runs the steps of ``model``, or of what it is part of; may raise `UsageError`."""
    tracker = tracker_of(model)
    if tracker is None and any(managed.tracker is not None for managed in managed_units(model)):
        raise UsageError(
            f"parts of this {type(model).__name__} have steps of their own; record each of them"
        )
    return tracker or ensure_tracker(model)
