# SPDX-License-Identifier: Apache-2.0
"""The ops of a planned step as a trace, to be compared with the engine's own."""

from fullshard.core.schedule import OF_PARAMETERS, Op
from fullshard.core.trace import Trace, TraceRecord
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.memory.activations import Activations
from fullshard.plan.memory.forecast import held_units
from fullshard.plan.run import Run
from fullshard.plan.step.script import Script

__all__ = ["planned_trace"]


def planned_trace(script: Script, run: Run, cluster: Cluster) -> Trace:
    """The ops of ``script`` as the engine's own trace has them, in the same bytes.

    Times are 0 here. A micro-batch after others, if there are several, as in `forecast_memory`.
    """
    activations = Activations(script, run)
    held = held_units(script, run, cluster, activations)
    trace = Trace()

    def note(op: str, number: int) -> None:
        unit = script.units[number]
        layout = unit.layout
        size = layout.full_bytes if op in OF_PARAMETERS else layout.grad_full_bytes
        record = TraceRecord(op, unit.path or "(root)", 0.0, size, held.buffers + held.leaving)
        trace.records.append(record)

    for line in script.lines:
        if isinstance(line, Op):
            held.carry_out(line)
            note(line.kind.value, line.unit)
            continue
        for number, index in activations.given(line):
            before = held.buffers
            held.take(number, index)
            if held.buffers != before:
                note("fill", number)
    return trace
