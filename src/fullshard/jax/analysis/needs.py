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
from jax.sharding import Mesh

from fullshard.core.text import in_columns
from fullshard.jax.analysis.hlo import StepTraffic, memory_of, traffic_of
from fullshard.jax.arrays.mesh import create_mesh
from fullshard.jax.arrays.rule import Rule
from fullshard.jax.training.options import MODES
from fullshard.jax.training.step import TrainStep

__all__ = [
    "Needs", "NeedsTable", "communication", "compare", "memory_analysis", "which_needs_less",
]  # fmt: skip

WHOLE = Rule(replicate=("",))
"""Every array on every device."""


@dataclass(frozen=True)
class Needs:
    """The needs of one step, in bytes on each device.

    ``state_bytes`` is what rests between steps: parameters, optimizer state and the rest;
    ``temporary_bytes`` what a step takes beside it, gradients among it; ``peak_bytes`` both, the
    batch, and results that have no place in the state given.
    """

    name: str
    devices: int
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    communication: StepTraffic

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step."""
        return self.communication.sent_bytes


@dataclass(frozen=True)
class NeedsTable:
    """Ways to run the same step, each with what it needs."""

    rows: tuple[Needs, ...]

    def __getitem__(self, name: str) -> Needs:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}; there are {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        head = ("bytes per device", "devices", "state", "temporary", "peak", "sent in a step")
        rows = [(x.name, x.devices, x.state_bytes, x.temporary_bytes, x.peak_bytes, x.sent_bytes)
                for x in self.rows]  # fmt: skip
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
    whole = step.variant(rule=WHOLE, mode="jit")
    return NeedsTable((_needs("sharded", step, batch), _needs("unsharded", whole, batch)))


def which_needs_less(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` in every mode, to be weighed: "weights", "activations", "jit". Each is compiled."""
    own = step.options["mode"]
    steps = {mode: step if mode == own else step.variant(mode=mode) for mode in MODES}
    return NeedsTable(tuple(_needs(mode, each, batch) for mode, each in steps.items()))


def compare(step: TrainStep, batch: Any, meshes: Mapping[str, Mesh] | None = None) -> NeedsTable:
    """Data parallel, FSDP over all devices, and hybrid sharding for the model of ``step``.

    All take the step's devices. The hybrid shards within groups, one for each process or, with one
    process, halves. ``meshes`` adds rows of your own; the step itself is a row too, if its mesh is
    none of these ("as it is").
    """
    flat = list(step.mesh.devices.flat)
    groups = len({device.process_index for device in flat})
    groups = groups if groups > 1 else 2
    row = create_mesh(fsdp=len(flat), devices=flat)
    usual: Any = {"shard_axis": None, "batch_axes": None}
    steps = {"data parallel": step.variant(row, rule=WHOLE, mode="jit", **usual)}
    chosen = {f"FSDP over {len(flat)}": row}
    if len(flat) % groups == 0 and len(flat) > groups:
        within = len(flat) // groups
        chosen[f"hybrid, {groups} x {within}"] = create_mesh(within, data=groups, devices=flat)
    for name, mesh in {**chosen, **(meshes or {})}.items():
        same = dict(mesh.shape) == dict(step.mesh.shape)
        steps[name] = step if same else step.variant(mesh, **usual)
    if step not in steps.values():
        steps["as it is"] = step
    return NeedsTable(tuple(_needs(name, each, batch) for name, each in steps.items()))


def _needs(name: str, step: TrainStep, batch: Any) -> Needs:
    memory = memory_of(step.compiled(batch))
    state = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(step.abstract_state())
    )
    sent = communication(step, batch)
    return Needs(name, step.mesh.size, state, memory["temporary"], memory["peak"], sent)
