# SPDX-License-Identifier: Apache-2.0
"""What a step needs, told before it runs: memory and traffic, beside other ways to lay it out.

Figures are those of compiled programs, for each device. Nothing is allocated to make them, and only
compiling takes time: some seconds for each row of a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import in_columns
from fullshard.jax.collectives import Communication, communication
from fullshard.jax.elsewhere import abstract_mesh, compile_elsewhere, memory_of
from fullshard.jax.mesh import create_mesh
from fullshard.jax.placement import Rule
from fullshard.jax.step import TrainStep

__all__ = ["Needs", "NeedsTable", "compare", "memory_analysis", "which_needs_less"]

WHOLE = Rule(replicate=("",))
"""Every array on every device."""


@dataclass(frozen=True)
class Needs:
    """What one step needs, in bytes on each device.

    ``state_bytes`` is what rests between steps: parameters, optimizer state and the rest;
    ``temporary_bytes`` what a step takes beside it, gradients among it; ``peak_bytes`` both, the
    batch, and results that have no place in the state given. ``estimate`` tells that the program
    was compiled for CPUs though other devices were meant: their compilers lay out temporary memory
    in other ways.
    """

    name: str
    devices: int
    state_bytes: int
    temporary_bytes: int
    peak_bytes: int
    communication: Communication
    estimate: bool = False

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

    @property
    def least(self) -> Needs:
        """The row with the lowest peak; of equal ones that which sends less."""
        return min(self.rows, key=lambda row: (row.peak_bytes, row.sent_bytes))

    def __str__(self) -> str:
        head = ("bytes per device", "devices", "state", "temporary", "peak", "sent in a step")
        rows: list[tuple[object, ...]] = [head]
        for row in self.rows:
            name = f"{row.name} (estimate)" if row.estimate else row.name
            found = (row.state_bytes, row.temporary_bytes, row.peak_bytes, row.sent_bytes)
            rows.append((name, row.devices, *found))
        return in_columns(rows, right=(1, 2, 3, 4, 5))


def memory_analysis(step: TrainStep, batch: Any, devices: int | None = None) -> NeedsTable:
    """``step`` beside the same step with every array on every device: "sharded", "unsharded".

    Exact for the devices of the step's mesh. With ``devices``, for a mesh whose fsdp axis has as
    many more or fewer of them: exact for CPUs, else marked as an estimate. That is compiled in
    another process, with as many simulated devices. ``batch`` (arrays or shapes) is the global one;
    it must divide by the devices.

    Raises:
        ConfigurationError: if ``devices`` or the batch do not divide, or that process fails.
    """
    mesh: Mesh | AbstractMesh = step.mesh
    if devices is not None and devices != mesh.size:
        others = mesh.shape["data"] * mesh.shape["tensor"]
        if devices < 1 or devices % others:
            raise ConfigurationError(
                f"devices={devices} is no multiple of data x tensor = {others} of the step's mesh"
            )
        mesh = abstract_mesh(mesh.shape["data"], devices // others, mesh.shape["tensor"])
    here = isinstance(mesh, Mesh)
    estimate = not here and step.mesh.devices.flat[0].platform != "cpu"
    if here:
        sharded, data_parallel = step, _unsharded(step, _in_a_row(step.mesh))
    else:
        sharded = step.variant(mesh)  # type: ignore[arg-type]  # enough for tracing
        data_parallel = _unsharded(step, abstract_mesh(1, mesh.size, 1))
    return NeedsTable(
        (
            _needs("sharded", sharded, batch, estimate),
            _needs("unsharded", data_parallel, batch, estimate),
        )
    )


def which_needs_less(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` in both modes: "shard_map" with explicit collectives, "compiler" with XLA's choice.

    ``which_needs_less(...).least.name`` is the mode to give to `make_train_step`.

    Raises:
        ConfigurationError: if the mesh has a tensor axis, along which only the compiler cuts.
    """
    if step.mesh.shape["tensor"] > 1:
        raise ConfigurationError(
            "with a tensor axis there is one mode, 'compiler': nothing to choose from"
        )
    modes = ("shard_map", "compiler")
    steps = {mode: step if step.options.mode == mode else step.variant(mode=mode) for mode in modes}
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
    row = _in_a_row(step.mesh)
    steps = {"data parallel": _unsharded(step, row)}
    chosen = {f"FSDP over {len(flat)}": row}
    if len(flat) % groups == 0 and len(flat) > groups:
        within = len(flat) // groups
        chosen[f"hybrid, {groups} x {within}"] = create_mesh(within, data=groups, devices=flat)
    chosen |= dict(meshes or {})
    for name, mesh in chosen.items():
        same = dict(mesh.shape) == dict(step.mesh.shape)
        steps[name] = step if same else step.variant(mesh, **_mode_for(step, mesh))
    if step not in steps.values():
        steps["as it is"] = step
    return NeedsTable(tuple(_needs(name, each, batch) for name, each in steps.items()))


def _mode_for(step: TrainStep, mesh: Mesh) -> Any:
    """Options that a step needs on another mesh: none without a tensor axis but what it has."""
    tensor = mesh.shape["tensor"] > 1
    return {"mode": "auto"} if tensor != (step.mesh.shape["tensor"] > 1) else {}


def _in_a_row(mesh: Mesh) -> Mesh:
    return create_mesh(fsdp=mesh.size, devices=list(mesh.devices.flat))


def _unsharded(step: TrainStep, mesh: Any) -> TrainStep:
    return step.variant(mesh, rule=WHOLE, mode="shard_map")


def _needs(name: str, step: TrainStep, batch: Any, estimate: bool = False) -> Needs:
    if isinstance(step.mesh, Mesh):
        memory = memory_of(step.compiled(batch))
        traffic = communication(step, batch)
    else:
        memory, traffic = compile_elsewhere(step, batch)
    state = sum(map(_device_bytes, jax.tree.leaves(step.abstract_state())))
    return Needs(
        name,
        step.mesh.size,
        state,
        memory["temporary"],
        memory["peak"],
        traffic,
        estimate,
    )


def _device_bytes(leaf: Any) -> int:
    shape: Sequence[int] = leaf.sharding.shard_shape(leaf.shape)
    size = leaf.dtype.itemsize
    for dim in shape:
        size *= dim
    return size
