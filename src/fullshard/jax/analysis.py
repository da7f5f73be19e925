# SPDX-License-Identifier: Apache-2.0
"""The needs of a step, told before it runs: memory and traffic, beside other ways to lay it out.

Figures are those of compiled programs, for each device. Nothing is allocated to make them, and only
compiling takes time: some seconds for each row of a table.

[Note: Bytes sent]
Among ``g`` devices a gather or a reduce-scatter of an array of B bytes sends at least (g-1)/g B
from each device, an all-reduce twice that, and rings reach it (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms for clusters of workstations"). That is what is counted, whatever
algorithm a backend takes.

[Note: A text that is read]
There is no interface to a compiled program but its text, whose form nobody promises. It is read
here and nowhere else, and what cannot be read is an error: a collective that no pattern took in,
groups of devices in another notation, a dtype of unknown size.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.text import bytes_text, in_columns
from fullshard.jax.rule import Rule
from fullshard.jax.step import TrainStep

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLEES = re.compile(r"\b(body|calls|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

_Line = tuple[str, str, str, str]  # name, result, operation, operands and attributes


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    ``arrays`` gives dtype (as XLA writes it) and elements of what a gather makes or a reduce takes;
    CPUs send bfloat16 as f32. ``group`` is the number of devices that take part in it together,
    ``count`` how often it runs in a step.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    group: int
    count: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends for it in a step; [Note: Bytes sent]."""
        bits = self.count * sum(numel * _item_bits(dtype) for dtype, numel in self.arrays)
        if self.kind == "collective-permute":
            return bits // 8
        return (2 if self.kind == "all-reduce" else 1) * bits * (self.group - 1) // self.group // 8


@dataclass(frozen=True)
class StepTraffic:
    """The traffic of a step between devices."""

    collectives: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in a step, as compiled."""
        return sum(each.sent_bytes for each in self.collectives)

    def of(self, kind: str) -> tuple[Collective, ...]:
        """Return the collectives of one kind, as "all-gather"."""
        return tuple(each for each in self.collectives if each.kind == kind)

    def __str__(self) -> str:
        alike: dict[tuple[object, ...], list[int]] = {}
        for each in self.collectives:
            dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in each.arrays))
            numel = sum(numel for _, numel in each.arrays)
            sums = alike.setdefault((each.kind, dtypes, numel, each.group), [0, 0])
            sums[0] += each.count
            sums[1] += each.sent_bytes
        rows = [(*what, *sums) for what, sums in sorted(alike.items(), key=lambda x: -x[1][1])]
        head = ("collective", "dtype", "elements", "devices", "times a step", "bytes sent")
        total = f"\ntogether {bytes_text(self.sent_bytes)} a step sent by each device"
        return in_columns([head, *rows], right=(2, 3, 4, 5)) + total


def traffic_of(text: str, devices: int) -> StepTraffic:
    """The collectives in a compiled program's text.

    A loop whose length XLA does not know counts once. Raises `NotSupportedError` for a program with
    a collective that cannot be read.
    """
    bodies, entry = _computations(text)
    mentioned = len(re.findall(rf"[=)}}\]] (?:{'|'.join(KINDS)})(?:-start)?\(", text))
    read = sum(kind.removesuffix("-start") in KINDS for x in bodies.values() for _, _, kind, _ in x)
    if mentioned != read or not entry:
        raise NotSupportedError(
            f"the compiled program mentions {mentioned} collectives, of which {read} were read, "
            f"and its entry is {entry or 'not found'!r}: this XLA writes programs in a form that "
            "fullshard does not know; please report it with the versions of jax and jaxlib"
        )
    times = dict.fromkeys(bodies, 0)
    _count(entry, 1, bodies, times)
    return StepTraffic(tuple(
        _collective(line, devices, times[name]) for name, lines in bodies.items() if times[name]
        for line in lines if line[2].removesuffix("-start") in KINDS
    ))  # fmt: skip


def _computations(text: str) -> tuple[dict[str, list[_Line]], str]:
    """The instructions of each computation, and which is the entry."""
    bodies: dict[str, list[_Line]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head.group(2)
            bodies[current] = []
            entry = current if head.group(1) else entry
        elif current and (found := _INSTRUCTION.match(line)):
            name, result, kind, rest = found.groups()
            bodies[current].append((name, result, kind, rest))
    return bodies, entry


def _count(
    name: str, times: int, bodies: Mapping[str, Sequence[_Line]], found: dict[str, int]
) -> None:
    """Add to ``found`` how often each computation runs if ``name`` does so many times."""
    if name not in found:
        return
    found[name] += times
    for *_, attributes in bodies[name]:
        trips = _TRIPS.search(attributes)
        for how, several, one in _CALLEES.findall(attributes):
            inside = times * int(trips.group(1)) if how == "body" and trips else times
            for callee in re.findall(r"[\w.\-]+", several or one):
                _count(callee, inside, bodies, found)


def _collective(line: _Line, devices: int, count: int) -> Collective:
    name, result, operation, attributes = line
    kind, group = operation.removesuffix("-start"), _group_size(attributes, devices)
    arrays = [(dtype, _numel(dims)) for dtype, dims in _ARRAY.findall(result)]
    if kind != operation and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # its operands stand before its results
    if kind == "reduce-scatter":
        arrays = [(dtype, group * numel) for dtype, numel in arrays]
    return Collective(name, kind, tuple(arrays), group, count)


def _group_size(attributes: str, devices: int) -> int:
    """Count the devices that take part in a collective; all if its groups are not told."""
    written = attributes.partition("replica_groups=")[2]
    listed = re.match(r"\{\{([\d,]+)\}", written)
    if listed:
        return listed.group(1).count(",") + 1
    iota = re.match(r"\[(\d+),(\d+)\]<=", written)
    if iota:
        return int(iota.group(2))
    by_axes = re.match(r"@?\w+\[([^\]]*)\](?:, device_ids=\([^{]*)? *\{([^}]*)\}", written)
    if by_axes:
        sizes = dict(re.findall(r"'?([\w.\-]+)'?=(\d+)", by_axes.group(1)))
        # A part of an axis is written 'name':(before)size.
        parts = [each.strip() for each in by_axes.group(2).split(",") if each.strip()]
        return math.prod(
            int(part.rpartition(")")[2]) if ")" in part else int(sizes[part.strip("'")])
            for part in parts
        )
    if written.startswith("{}") or not written:
        return devices
    raise NotSupportedError(f"groups of devices in an unknown notation: {written[:60]!r}")


def _numel(dims: str) -> int:
    return math.prod(int(dim) for dim in dims.split(",") if dim)


def _item_bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if digits is None:
        raise NotSupportedError(f"a dtype of unknown size in a compiled program: {dtype!r}")
    return int(digits.group(1))


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """A compiled program's arguments, temporary memory and peak, in bytes on each device.

    The peak is everything that the program's buffers take; ``peak_memory_in_bytes`` leaves
    temporary ones out on CPUs.
    """
    memory: Any = compiled.memory_analysis()
    apart = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.argument_size_in_bytes + apart + memory.temp_size_in_bytes,
    }


# -- steps ----------------------------------------------------------------------------------------

_FLAGS = {
    "gpu": (
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_gpu_enable_pipelined_all_gather=true",
        "--xla_gpu_enable_pipelined_reduce_scatter=true",
        "--xla_gpu_enable_pipelined_all_reduce=true",
        "--xla_gpu_enable_while_loop_double_buffering=true",
        "--xla_gpu_all_gather_combine_threshold_bytes=134217728",
        "--xla_gpu_reduce_scatter_combine_threshold_bytes=134217728",
    ),
    "tpu": (
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
    ),
    "cpu": (),
}


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
    """Ways to run the same step by name, each with what it needs; printed as a table."""

    def __str__(self) -> str:
        head = ("bytes per device", "devices", "state", "temporary", "peak", "sent in a step")
        rows = [(name, x.devices, x.state_bytes, x.temporary_bytes, x.peak_bytes, x.sent_bytes)
                for name, x in self.items()]  # fmt: skip
        return in_columns([head, *rows], right=(1, 2, 3, 4, 5))


def communication(step: TrainStep, batch: Any) -> StepTraffic:
    """Read what ``step`` sends for batches like this one (arrays or shapes) from its program.

    Nothing is allocated. Loops count as often as they run.
    """
    return traffic_of(step.compiled(batch).as_text() or "", step.mesh.size)


def compare(steps: Mapping[str, TrainStep], batch: Any) -> NeedsTable:
    """Tell what each of ``steps`` needs for batches like this one (arrays or shapes); compiles all.

    `TrainStep.variant` makes steps of one model on other meshes, in other modes and by other rules.
    """
    table = NeedsTable()
    for name, step in steps.items():
        memory = memory_of(step.compiled(batch))
        state = sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(step.abstract_state())
        )
        sent = communication(step, batch)
        table[name] = Needs(step.mesh.size, state, memory["temporary"], memory["peak"], sent)
    return table


def memory_analysis(step: TrainStep, batch: Any) -> NeedsTable:
    """``step`` beside the same step with every array on every device: "sharded", "unsharded".

    Exact for the devices of the step's mesh. ``batch`` (arrays or shapes) is the global one.
    """
    whole = step.variant(rule=Rule(replicate=("",)), mode="jit")
    return compare({"sharded": step, "unsharded": whole}, batch)


def overlap_flags(platform: str) -> str:
    """The flags of XLA that run collectives beside computation on "gpu", "tpu" or "cpu" (none).

    One line, to be put into ``XLA_FLAGS`` (of TPUs ``LIBTPU_INIT_ARGS``) before JAX looks for
    devices. Gathers of the next layer and reductions of the last then run while a layer computes,
    at the cost of one more layer in memory. Raises `ConfigurationError` for another platform.
    """
    if platform not in _FLAGS:
        raise ConfigurationError(f"platform={platform!r} is none of {', '.join(_FLAGS)}")
    return " ".join(_FLAGS[platform])
