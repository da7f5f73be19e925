# SPDX-License-Identifier: Apache-2.0
"""The needs of a step, told before it runs: memory and traffic, beside other ways to lay it out.

Figures are those of compiled programs, for each device. Nothing is allocated to make them, and only
compiling takes time: some seconds for each row of a table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fullshard.core.text import in_columns
from fullshard.jax.analysis.hlo import StepTraffic, memory_of, traffic_of
from fullshard.jax.arrays.mesh import create_mesh
from fullshard.jax.arrays.rule import Rule
from fullshard.jax.training.options import MODES
from fullshard.jax.training.step import TrainStep

__all__ = [
    "Needs", "NeedsTable", "communication", "compare", "memory_analysis", "which_needs_less",
]  # fmt: skip

_WHOLE = Rule(replicate=("",))  # every array on every device


@dataclass(frozen=True)
class Needs:
    """The needs of one step, in bytes on each device.

    ``state_bytes`` is what rests between steps: parameters, optimizer state and the rest;
    ``temporary_bytes`` what a step takes beside it, gradients among it; ``peak_bytes`` both, the
    batch, and results that have no place in the state given.
    """

    devices: int
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    communication: StepTraffic

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return self.communication.sent_bytes


class NeedsTable(dict[str, Needs]):
    """Ways to run the same step by name, each with what it needs."""

    def __missing__(self, name: str) -> Needs:
        raise KeyError(f"{name!r}; there are {', '.join(self)}")

    def __str__(self) -> str:
        head = ("bytes per device", "devices", "state", "temporary", "peak", "sent in a step")
        rows = [(name, x.devices, x.state_bytes, x.temporary_bytes, x.peak_bytes, x.sent_bytes)
                for name, x in self.items()]  # fmt: skip
        return in_columns([head, *rows], right=(1, 2, 3, 4, 5))


def communication(step: TrainStep, batch: Any) -> StepTraffic:
    """Read what ``step`` sends for batches like this one (arrays or shapes) from its program.

    Nothing is allocated. Loops count as often as they run.
    """
    precision = step.options["precision"]
    low = {precision.compute, precision.reduce} - {None, "float32", "float64"}
    # Before compilation it may be written to send other dtypes.
    written = step.lowered(batch).as_text() if low else ""
    return traffic_of(step.compiled(batch).as_text() or "", step.mesh.size, written)


def memory_analysis(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` beside the same step with every array on every device: "sharded", "unsharded".

    Exact for the devices of the step's mesh. ``batch`` (arrays or shapes) is the global one.
    """
    whole = step.variant(rule=_WHOLE, mode="jit")
    return _table({"sharded": step, "unsharded": whole}, batch)


def which_needs_less(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` in every mode, to be weighed: "weights", "activations", "jit". Each is compiled."""
    own = step.options["mode"]
    return _table({m: step if m == own else step.variant(mode=m) for m in MODES}, batch)


def compare(step: TrainStep, batch: Any) -> NeedsTable:
    """Data parallel, FSDP over all devices, and hybrid sharding for the model of ``step``.

    All take the step's devices. The hybrid shards within groups, one for each process or, with one
    process, halves. The step itself is a row too, if its mesh is none of these ("as it is").
    """
    flat = list(step.mesh.devices.flat)
    groups = max(2, len({device.process_index for device in flat}))
    row = create_mesh(fsdp=len(flat), devices=flat)
    usual: Any = {"shard_axis": None, "batch_axes": None}
    steps = {"data parallel": step.variant(row, rule=_WHOLE, mode="jit", **usual)}
    chosen = {f"FSDP over {len(flat)}": row}
    within, rest = divmod(len(flat), groups)
    if rest == 0 and within > 1:
        chosen[f"hybrid, {groups} x {within}"] = create_mesh(within, data=groups, devices=flat)
    for name, mesh in chosen.items():
        same = dict(mesh.shape) == dict(step.mesh.shape)
        steps[name] = step if same else step.variant(mesh, **usual)
    if step not in steps.values():
        steps["as it is"] = step
    return _table(steps, batch)


def _table(steps: Mapping[str, TrainStep], batch: Any) -> NeedsTable:
    return NeedsTable({name: _needs(step, batch) for name, step in steps.items()})


def _needs(step: TrainStep, batch: Any) -> Needs:
    memory = memory_of(step.compiled(batch))
    state = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(step.abstract_state())
    )
    sent = communication(step, batch)
    return Needs(step.mesh.size, state, memory["temporary"], memory["peak"], sent)
