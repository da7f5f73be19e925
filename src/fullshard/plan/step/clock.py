# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step: its script replayed on a compute stream and two communication streams.

Gathers and reduces have communicators of their own, so each has a stream; both share the links, so
what is issued later begins when the earlier one has its bytes. Compute waits where the engine
waits, and a collective begins no sooner than compute has reached the place where it was issued.
The host runs ahead and launches kernels one by one: where it cannot keep up, it is waited
for.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fullshard.core.layout import Layout
from fullshard.core.schedule import Op, OpKind
from fullshard.core.spec import item_bytes
from fullshard.plan.cluster.cluster import Cluster, Constants
from fullshard.plan.model.operations import Kind, Operation
from fullshard.plan.run import OPTIMIZERS, Engine, OptimizerKernels, Recompute, Run
from fullshard.plan.step.prices import Group, gather_s, operation_s, reduce_all_s
from fullshard.plan.step.script import Act, Pass, Script, offloaded_bytes
from fullshard.plan.step.units import PlannedUnit

_SYSTEM_BYTES = 2**25  # from here on the C library gives memory back when it is released


class _EngineCosts(NamedTuple):
    """The costs of an engine.

    ``copies`` are reads and writes of full parameters; those of FSDP1 are fitted with those of
    FSDP2. ``call_s`` is what a gather, or a reduce, of a unit takes the host: a third of what a
    unit and step took it in benchmarks/host_time.py, beyond the plain model, with small layers.
    ``loop_s`` is AdamW's for each parameter where it goes through them one by one: 91 us on the
    host of an H100, 8.3 times that for FSDP2's DTensors, 1.1 for ours (measured on a CPU).
    ``hooks_s`` is what hooks of every module take in a block's forward, recomputation or backward,
    ``exposed_share`` the share of communication that is waited for though compute could hide it.
    """

    copies: int
    call_s: float
    loop_s: float
    hooks_s: float = 0.0
    exposed_share: float = 0.0


# Of another engine the last two are the middle of what interval.py lets them be.
_COSTS = {
    Engine.FULLSHARD: _EngineCosts(0, 100e-6, 100e-6),
    Engine.FSDP1: _EngineCosts(4, 310e-6, 91e-6),
    Engine.FSDP2: _EngineCosts(4, 260e-6, 755e-6),
    Engine.OTHER: _EngineCosts(4, 260e-6, 91e-6, 1.5e-3, 0.5),
}
# By a kernel for each of its operations AdamW moves three times the bytes of a fused one, and on a
# host takes longer yet, by bytes of an element (benchmarks/data/measured). There, with 16 cores, a
# fused one moves 160 GB/s.
_SINGLE_KERNELS = 2.9
_SINGLE_ON_HOST = {2: 6.6, 4: 4.8}
_HOST_BANDWIDTH = 160e9
# FSDP1 asks for frozen and trained parameters apart, so that PEFT makes a unit of each adapter: two
# for each of a block's queries, keys, values and outputs. A call of a unit costs the host a
# millisecond (pytorch/pytorch issue 173680), and `limit_all_gathers` keeps it two units ahead.
_ADAPTER_UNITS = 8
_ADAPTER_CALL_S = 1e-3


@dataclass(frozen=True)
class Busy:
    """Work on ``stream`` (compute, gather or reduce) without a break.

    ``kind`` is forward, again (recomputed), backward, gather or reduce; ``name`` that of the module
    or unit.
    """

    stream: str
    kind: str
    name: str
    unit: int
    start_s: float
    stop_s: float

    @property
    def label(self) -> str:
        """Kind and name in one."""
        return f"{self.kind} {self.name}"


@dataclass
class Timeline:
    """One micro-batch on its streams, and the step that it is part of.

    ``parts`` splits ``step_s`` into compute, exposed communication, host, optimizer, overhead and
    stragglers. ``communication_s`` is all communication of a step, hidden or not,
    ``attention_s`` the part of computing that attention kernels take, ``launched_s`` what the host
    takes to launch all of it, ``loop_s`` the optimizer if it went through parameters one by one.
    """

    records: list[Busy] = field(default_factory=list)
    parts: Mapping[str, float] = field(default_factory=dict)
    step_s: float = 0.0
    communication_s: float = 0.0
    attention_s: float = 0.0
    launched_s: float = 0.0
    loop_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """A step of ``run`` on ``cluster``, its ``timeline``, and what that was replayed from."""

    script: Script
    run: Run
    cluster: Cluster
    constants: Constants
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.timeline.step_s

    def share(self, part: str) -> float:
        """The share of the step that ``part`` of its timeline takes."""
        return self.timeline.parts[part] / self.step_s

    def records(self) -> list[Busy]:
        """Work on each stream, for drawing."""
        return replay(self.script, self.run, self.cluster, self.constants, record=True).records


def replay(
    script: Script, run: Run, cluster: Cluster, constants: Constants, *, record: bool = False
) -> Timeline:
    """Seconds of a step of ``run``; with ``record`` what keeps streams busy is kept for drawing.

    Of several micro-batches all but the last may leave out reduces.
    """
    quiet = run.accumulate > 1 and not run.sync_each
    passed = [_passed(_Streams(script, run, cluster, constants, record), reduces=True)]
    if quiet:
        passed.append(_passed(_Streams(script, run, cluster, constants, False), reduces=False))
    return _whole_step(passed, script, run, cluster, constants)


def _passed(streams: "_Streams", *, reduces: bool) -> "_Streams":
    """Carry out the lines of one micro-batch."""
    for line in streams.script.lines:
        if isinstance(line, Act):
            streams.act(line)
        elif reduces or line.kind not in (OpKind.REDUCE, OpKind.ALL_REDUCE, OpKind.AWAIT_REDUCE):
            streams.op(line)
    return streams


class _Streams:
    """When each stream is free, and what is under way."""

    def __init__(
        self, script: Script, run: Run, cluster: Cluster, constants: Constants, record: bool
    ):
        self.script, self.run, self.cluster, self.constants = script, run, cluster, constants
        self.records: list[Busy] | None = [] if record else None
        self.compute = self.wire_free = self.reduce = self.host = 0.0
        self.busy = self.waited = self.stalled = self.slowed = self.communication = 0.0
        self.attention = 0.0
        self.gathers: dict[int, float] = {}
        self.reduces: dict[int, float] = {}
        self.wire: list[tuple[float, float]] = []
        self._acts: dict[tuple[int, Pass], tuple[float, int, float, float, float]] = {}
        self._units: dict[int, tuple[float, float, float]] = {}
        self._priced: dict[tuple[int, ...], tuple[float, float, float]] = {}

    def act(self, act: Act) -> None:
        call = self.script.calls[act.call]
        key = (id(call.operations), act.phase)
        if key not in self._acts:
            self._acts[key] = self._price(call.operations, act)
        seconds, kernels, attention, travel, idle = self._acts[key]
        self.attention += attention
        self.stalled += idle
        if self.cluster.device.cpu:  # the host itself computes, one operation after another
            seconds += self.constants.kernel_s * kernels
            kernels = 0
        self.host += _COSTS[self.run.engine].hooks_s
        launched = self.host + self.constants.kernel_s * min(kernels, 1)
        self.host += self.constants.kernel_s * kernels
        start = max(self.compute, launched)
        self.stalled += start - self.compute
        slowed = self._contended(start, seconds) if self.wire else 0.0
        stop = start + seconds + idle + slowed
        self.busy += seconds - travel
        self.waited += travel
        self.communication += travel
        self.slowed += slowed
        if self.host > stop:
            self.stalled += self.host - stop
            stop = self.host
        self._record("compute", act.phase.value, call.path, act.unit, start, stop)
        self.compute = stop

    def _price(
        self, operations: tuple[Operation, ...], act: Act
    ) -> tuple[float, int, float, float, float]:
        """Seconds and kernels of an act; of these seconds, attention's and collectives'; idle ones.

        Idle is a device that waits for a host that cannot be ahead of it.
        """
        seconds, kernels, attention, travel, idle = 0.0, 0, 0.0, 0.0, 0.0
        beside = 0.0  # what runs while the host is at adapters
        run = self.run
        for operation in _computed(operations, act.phase, run):
            backward = act.phase is Pass.BACKWARD
            work = operation.backward if backward else operation.forward
            spent = operation_s(operation, work, run, self.cluster, self.constants)
            seconds += spent
            attention += spent if operation.kind is Kind.ATTENTION else 0.0
            travel += spent if operation.kind in (Kind.WIRE, Kind.EXCHANGE) else 0.0
            kernels += work.kernels
            if operation.name == "attention out":
                beside = seconds
        if beside and run.engine is Engine.FSDP1 and run.lora_rank and self.cluster.devices > 1:
            calls = 2 if act.phase is Pass.BACKWARD else 1  # a gather and a reduce
            idle = max(0.0, calls * _ADAPTER_UNITS * _ADAPTER_CALL_S - beside)
        return seconds, kernels, attention, travel, idle

    def _contended(self, start: float, seconds: float) -> float:
        """Seconds that compute takes longer beside collectives, which need its memory and cores."""
        stop, overlap = start + seconds, 0.0
        self.wire = [each for each in self.wire if each[1] > start]
        for begin, end in self.wire:
            overlap += max(0.0, min(stop, end) - max(start, begin))
        return min(overlap, seconds) * self.constants.contention

    def op(self, op: Op) -> None:
        self.host += self.constants.kernel_s
        unit = self.script.units[op.unit]
        if op.kind in (OpKind.AWAIT_GATHER, OpKind.REDUCE) and unit.layout.shards > 1:
            self.host += _COSTS[self.run.engine].call_s
        if op.kind is OpKind.REDUCE:
            self._copy(unit)
        self._take_memory(op.kind, unit.layout)
        if op.kind is OpKind.GATHER:
            seconds = self._unit_s(op.unit)[0]
            begin = max(self.wire_free, self.host, self.compute)  # c10d waits for compute so far
            self.wire_free = self.gathers[op.unit] = begin + seconds
            self._on_wire("gather", unit, op.unit, begin, self.wire_free)
        elif op.kind is OpKind.AWAIT_GATHER:
            self._wait(self.gathers.pop(op.unit, 0.0))
        elif op.kind in (OpKind.REDUCE, OpKind.ALL_REDUCE):
            seconds = self._unit_s(op.unit)[1 if op.kind is OpKind.REDUCE else 2]
            begin = max(self.wire_free, self.host, self.compute)
            self.wire_free = self.reduce = self.reduces[op.unit] = begin + seconds
            self._on_wire("reduce", unit, op.unit, begin, self.reduce)
        elif op.kind is OpKind.AWAIT_REDUCE:
            self._wait(self.reduces.pop(op.unit, 0.0))

    def _copy(self, unit: PlannedUnit) -> None:
        """Gradients went from where backward makes them into the buffer that travels."""
        memory = self.cluster.device.bandwidth * self.constants.memory_share
        layout = unit.layout
        numel = sum(each.full_numel for each in layout.segments if each.trainable)
        item = item_bytes(self.run.compute_dtype)
        copied = layout.grad_moved_bytes + layout.grad_copied_bytes
        copies = _COSTS[self.run.engine].copies if layout.shards > 1 else 0
        moved = numel * item * copies + copied
        self.compute += moved / memory
        self.busy += moved / memory

    def _take_memory(self, kind: OpKind, layout: Layout) -> None:
        """Large buffers of a CPU come from the system at each use, which has to clear them.

        A gather's has the full parameters, a reduce's the gradients that are copied for it; another
        what is received.
        """
        fresh, shards = self.cluster.device.fresh, layout.shards
        if fresh is None or shards == 1:
            return
        sizes: tuple[float, ...] = ()
        if kind is OpKind.GATHER:
            sizes = (layout.full_bytes,)
        elif kind is OpKind.REDUCE:
            sizes = layout.grad_copied_bytes, layout.grad_full_bytes * (shards - 1) / shards
        seconds = sum(each for each in sizes if each >= _SYSTEM_BYTES) / fresh
        self.compute += seconds
        self.busy += seconds

    def _wait(self, until: float) -> None:
        if until > self.compute:
            self.waited += until - self.compute
            self.compute = until

    def _on_wire(
        self, stream: str, unit: PlannedUnit, number: int, begin: float, end: float
    ) -> None:
        if end > begin:
            self.communication += end - begin
            self.wire.append((begin, end))
            self._record(stream, stream, unit.path, number, begin, end)

    def _record(
        self, stream: str, kind: str, path: str, unit: int, start: float, stop: float
    ) -> None:
        if self.records is not None and stop > start:
            self.records.append(Busy(stream, kind, path or "(root)", unit, start, stop))

    def _unit_s(self, number: int) -> tuple[float, float, float]:
        """Seconds to gather the unit, to reduce it, and to sum its slice over replicas."""
        if number not in self._units:
            unit = self.script.units[number]
            layout, cost = unit.layout, unit.cost
            sizes = (layout.full_bytes, layout.grad_full_bytes, layout.shards)
            key = (*sizes, cost.all_reduce_bytes, unit.dealt_out)
            if key not in self._priced:
                self._priced[key] = self._price_unit(unit)
            self._units[number] = self._priced[key]
        return self._units[number]

    def _wire_bytes(self, layout: Layout) -> float:
        """Return the bytes that a gather of the unit sends, all slices together."""
        dtype = self.run.gather_dtype
        if dtype is None:
            return layout.full_bytes
        return sum(
            min(item_bytes(dtype), item_bytes(each.full_dtype)) * each.full_numel
            for each in layout.segments
        )

    def _price_unit(self, unit: PlannedUnit) -> tuple[float, float, float]:
        run, cluster, constants = self.run, self.cluster, self.constants
        layout, shards = unit.layout, unit.layout.shards
        apart = run.tensor_parallel  # neighbours that share other parameters
        if unit.dealt_out:
            apart = run.expert_parallel
        ranks = cluster.devices // apart
        per_host = max(1, cluster.per_host // apart)
        inside = Group(shards, min(shards, per_host))
        gather = gather_s(self._wire_bytes(layout), inside, cluster, constants)
        reduce = gather_s(layout.grad_full_bytes, inside, cluster, constants)
        if run.offload.to_host:
            gather += layout.shard_bytes / cluster.device.host_link
            reduce += layout.grad_shard_bytes / cluster.device.host_link
        replicas = ranks // shards
        across = Group(replicas, max(1, min(replicas, per_host // min(shards, per_host))))
        slice_bytes = layout.grad_full_bytes / shards
        all_reduce = reduce_all_s(slice_bytes, across, cluster, constants)
        return gather, reduce if shards > 1 else all_reduce, all_reduce


def _computed(operations: tuple[Operation, ...], phase: Pass, run: Run) -> tuple[Operation, ...]:
    """Leave out what is not computed: recomputation stops when all that was dropped is there."""
    if phase is not Pass.AGAIN:
        return operations
    if run.recompute is Recompute.SELECTIVE:
        return tuple(_kept_in_turns(operations))
    if not run.recompute_stops or not any(each.saved_bytes for each in operations):
        return operations  # all of them, as in a recording of what was recomputed
    # What is added last is the next block's input, which that keeps anyhow.
    kept = [place for place, o in enumerate(operations) if o.saved_bytes and o.name != "add"]
    return operations[: max(kept, default=-1) + 1]


def _kept_in_turns(operations: tuple[Operation, ...]) -> Iterator[Operation]:
    """Cheap operations, and of the matrix products the second, fourth and so on."""
    products = 0
    for each in operations:
        products += each.kind is Kind.MATMUL and not each.cheap
        if each.cheap or (each.kind is Kind.MATMUL and products % 2 == 0):
            yield each


def _whole_step(
    passed: Sequence[_Streams], script: Script, run: Run, cluster: Cluster, constants: Constants
) -> Timeline:
    """Add up micro-batches: the last one, which is the first of ``passed``, and those before it."""
    streams, before = passed[0], passed[-1]

    def all_of(spent: Callable[[_Streams], float]) -> float:
        return spent(streams) + spent(before) * (run.accumulate - 1)

    # Activations go to the host and come back beside computation: what takes longer is waited for.
    copied_s = 2 * offloaded_bytes(script, run) / cluster.device.host_link

    def exposed_s(each: _Streams) -> float:
        waited = each.waited + max(0.0, each.reduce - each.compute)
        shown = _COSTS[run.engine].exposed_share * max(0.0, each.communication - waited)
        return waited + shown + max(0.0, copied_s - each.busy)

    optimizer = _optimizer_s(script, run, cluster, constants, run.optimizer_kernels)
    busy, slowed = all_of(lambda each: each.busy), all_of(lambda each: each.slowed)
    exposed, stalled = all_of(exposed_s), all_of(lambda each: each.stalled)
    own = busy + slowed + exposed + stalled + optimizer
    doublings = (cluster.hosts - 1).bit_length()
    straggling = doublings * (constants.straggle_s + constants.straggle_share * own)
    parts = {
        "compute": busy,
        "contention": slowed,
        "exposed communication": exposed,
        "host": stalled,
        "optimizer": optimizer,
        "step overhead": constants.step_s if run.overhead_s is None else run.overhead_s,
        "stragglers": straggling,
    }
    return Timeline(
        streams.records or [],
        parts,
        sum(parts.values()),
        all_of(lambda each: each.communication),
        all_of(lambda each: each.attention),
        all_of(lambda each: each.host),
        _optimizer_s(script, run, cluster, constants, OptimizerKernels.LOOP),
    )


def _optimizer_s(
    script: Script,
    run: Run,
    cluster: Cluster,
    constants: Constants,
    kernels: OptimizerKernels | None,
) -> float:
    """Reads and writes of an element-wise optimizer over the shards, gradient clipping included."""
    item = item_bytes(run.param_dtype)
    shard = sum(unit.layout.grad_shard_bytes for unit in script.units) / item
    update = float(item * (3 + 2 * OPTIMIZERS[run.optimizer]))
    if kernels not in (None, OptimizerKernels.FUSED) and OPTIMIZERS[run.optimizer]:
        update *= _SINGLE_ON_HOST.get(item, 4.8) if run.offload.to_host else _SINGLE_KERNELS
    launched = 0.0
    if kernels is OptimizerKernels.LOOP:
        launched = _COSTS[run.engine].loop_s * sum(
            segment.trainable for unit in script.units for segment, _ in unit.layout
        )
    memory = cluster.device.bandwidth * constants.memory_share
    if run.offload.to_host:
        sharing = 1 if cluster.device.own_host else min(cluster.per_host, cluster.devices)
        memory = _HOST_BANDWIDTH / sharing
    return max(launched, shard * (update + 2 * item) / memory)
