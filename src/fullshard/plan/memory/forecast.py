# SPDX-License-Identifier: Apache-2.0
"""Replays the lines of a step with numbers for tensors: bytes by category, the peak, its cause.

Model state and the buffers of units follow the layouts and ops of the engine, to the byte.
Activations are those of the model's description. What torch's allocator, the driver and the
communication library take besides is an estimate, see `fullshard.plan.memory.resting`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fullshard.core.forecast import HeldUnits
from fullshard.core.schedule import Op, OpKind
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.memory.activations import Activations
from fullshard.plan.memory.fsdp2 import HeldByFSDP2
from fullshard.plan.memory.resting import (
    RestingMemory,
    allocator_slack,
    context_bytes,
    resting_memory,
)
from fullshard.plan.model.operations import Model
from fullshard.plan.run import Engine, OptimizerKernels, Run
from fullshard.plan.step.script import Act, Pass, Script, offloaded_bytes

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "unit buffers",
    "activations",
    "logits and loss",
    "allocator slack",
    "context and nccl",
)
"""Uses of device memory, in the order in which they are told."""

Bytes = tuple[int, int, int, int, int, int]
"""Bytes that tensors hold, by the first six categories."""

_WORDS = {
    OpKind.GATHER: "gather of",
    OpKind.AWAIT_GATHER: "wait for the gather of",
    OpKind.SHRINK: "shrinking",
    OpKind.FREE: "freeing",
    OpKind.REDUCE: "reduce of",
    OpKind.ALL_REDUCE: "all-reduce of",
    OpKind.AWAIT_REDUCE: "delivery of the gradients of",
}


@dataclass(frozen=True)
class Sample:
    """Device memory at one line of the script: the most while it is carried out, by category.

    ``line`` is its index in ``script.lines``; the last sample, of the optimizer, has the number
    of lines.
    """

    line: int
    label: str
    bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MemoryForecast:
    """The memory that one device holds at the peak of a step.

    ``peak`` is in bytes by category, ``cause`` says at which line that is and what is largest then.
    ``allocated_bytes`` is the peak of what tensors hold, ``reserved_bytes`` of what torch's
    allocator keeps for them, in pools of streams too; ``peak_bytes`` has context and NCCL besides.
    ``host_bytes`` rests in the memory of the host if state is offloaded.
    """

    peak: Mapping[str, int]
    cause: str
    resting: RestingMemory
    line: int
    allocated_bytes: int
    host_activations_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that the device's memory holds, as its driver would show it."""
        return sum(self.peak.values())

    @property
    def reserved_bytes(self) -> int:
        """The peak of what torch's allocator reserves."""
        return self.peak_bytes - self.peak["context and nccl"]

    @property
    def resting_bytes(self) -> int:
        """Parameters, gradients and optimizer state on the device between steps."""
        return self.resting.device_bytes

    @property
    def host_bytes(self) -> int:
        """The bytes that are in the host's memory for this rank: state, and activations."""
        return self.resting.host_bytes + self.host_activations_bytes


def forecast_memory(script: Script, model: Model, run: Run, cluster: Cluster) -> MemoryForecast:
    """Forecast what one device holds when it carries out ``script``, and the cause of the peak.

    Of a step with several micro-batches it is a later one, which finds the gradients of those
    before it. A micro-batch begins without gradients if it is the only one.
    """
    replay = _Replay(script, run, cluster)
    at, peak = max(replay.lines(), key=lambda each: sum(each[1]))
    allocated = sum(peak)
    if run.engine is not Engine.FULLSHARD:
        unpooled = _Replay(script, run, cluster, pooled=False)
        allocated = max(sum(now) for _, now in unpooled.lines())
    by_category = _with_overheads(peak, run, cluster, script)
    cause = _cause(script, at, by_category)
    offloaded = offloaded_bytes(script, run)
    return MemoryForecast(by_category, cause, replay.resting, at, allocated, offloaded)


def memory_timeline(script: Script, run: Run, cluster: Cluster) -> tuple[Sample, ...]:
    """Device memory at every line of ``script`` and in the optimizer's step."""
    replay = _Replay(script, run, cluster)
    return tuple(
        Sample(line, label_of(script, line), _with_overheads(held, run, cluster, script))
        for line, held in replay.lines()
    )


def held_units(
    script: Script, run: Run, cluster: Cluster, activations: Activations, *, pooled: bool = True
) -> HeldUnits:
    """Return what units hold as the step, or a later micro-batch, begins."""
    accumulating = run.accumulate > 1
    if run.engine is not Engine.FULLSHARD:
        return HeldByFSDP2(script.units, run, pooled=pooled)
    held = HeldUnits(
        {number: unit.cost for number, unit in enumerate(script.units)},
        accumulating=accumulating and run.sync_each,
        offloads=run.offload.to_host and not cluster.device.cpu,
    )
    if accumulating and not run.sync_each:
        for line in script.lines:
            for each in [] if isinstance(line, Op) else activations.given(line):
                held.take(*each)
    return held


def label_of(script: Script, line: int) -> str:
    """A line of the script in words."""
    if line >= len(script.lines):
        return "optimizer step"
    what = script.lines[line]
    if isinstance(what, Op):
        return f"{_WORDS[what.kind]} {script.units[what.unit].path or '(root)'}"
    direction = {Pass.FORWARD: "forward", Pass.AGAIN: "recomputation"}.get(what.phase, "backward")
    return f"{direction} of {script.calls[what.call].path or '(root)'}"


class _Replay:
    """One pass over the lines of a script."""

    def __init__(self, script: Script, run: Run, cluster: Cluster, *, pooled: bool = True):
        self._script = script
        self._run = run
        self.resting = resting_memory(script.units, run, cpu=cluster.device.cpu)
        self._activations = Activations(script, run)
        self._held = held_units(script, run, cluster, self._activations, pooled=pooled)
        state = self.resting
        shards = 0 if state.on_host else state.parameters_bytes
        self._parameters = script.buffers_bytes + state.working_bytes + shards
        self._optimizer = 0 if state.on_host else state.optimizer_bytes

    def lines(self) -> Iterator[tuple[int, Bytes]]:
        """Number of each line, and what is held at most while it is carried out."""
        held, activations = self._held, self._activations
        for number, line in enumerate(self._script.lines):
            if isinstance(line, Op):
                momentary = held.carry_out(line)
                yield number, self._now(momentary)
            else:
                yield number, self._act(line)
        held.end_step()
        activations.end_step()
        yield len(self._script.lines), self._optimizer_step()

    def _now(self, momentary: int = 0) -> Bytes:
        """Bytes held now, with ``momentary`` bytes of gradients besides."""
        return self._with(self._activations.kept, self._activations.logits, momentary)

    def _act(self, act: Act) -> Bytes:
        given = self._activations.given(act)
        (early, early_logits), (late, late_logits) = self._activations.carry_out(act)
        before = self._with(early, early_logits)
        twice = max((self._held.take(*each) for each in given), default=0)
        return max(before, self._with(late, late_logits, twice), key=sum)

    def _with(self, activations: int, logits: int, momentary: int = 0) -> Bytes:
        held = self._held
        state = (self._parameters, held.gradients + momentary, self._optimizer)
        return (*state, held.buffers, activations, logits)

    def _optimizer_step(self) -> Bytes:
        """Add a temporary like the parameters for foreach kernels; fused ones need none."""
        now = self._now()
        foreach = self._run.optimizer_kernels in (None, OptimizerKernels.FOREACH)
        if not foreach or self.resting.on_host or self._run.optimizer == "sgd":
            return now
        parameters = sum(
            segment.slice_bytes
            for unit in self._script.units
            for segment in unit.layout.segments
            if segment.trainable
        )
        return (now[0], now[1], now[2] + parameters, *now[3:])


def _with_overheads(held: Bytes, run: Run, cluster: Cluster, script: Script) -> dict[str, int]:
    by_category = dict(zip(CATEGORIES, held, strict=False))
    by_category["allocator slack"] = allocator_slack(held, cluster, run)
    by_category["context and nccl"] = context_bytes(cluster, script.units)
    return by_category


def _cause(script: Script, line: int, peak: Mapping[str, int]) -> str:
    largest = max(CATEGORIES[: len(CATEGORIES) - 2], key=lambda name: peak[name])
    share = peak[largest] / sum(peak.values()) if any(peak.values()) else 0.0
    return f"{label_of(script, line)}: {share:.0%} are {largest}"
