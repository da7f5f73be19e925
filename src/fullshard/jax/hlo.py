# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled program: which, of what, how often in a step, and the bytes sent.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from fullshard.core.errors import NotSupportedError
from fullshard.core.text import bytes_text, in_columns

__all__ = [
    "KINDS", "Collective", "Instruction", "StepTraffic", "instructions", "memory_of", "traffic_of",
]  # fmt: skip

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLEES = re.compile(r"\b(body|calls|to_apply|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_STABLE = re.compile(
    r'"stablehlo\.(all_gather|reduce_scatter|all_reduce)".*?-> tensor<((?:\d+x)*)(\w+)>', re.DOTALL
)
_STABLE_DTYPES = {f"i{bits}": f"s{bits}" for bits in (8, 16, 32, 64)} | {"i1": "pred"}


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program, and how often a step carries it out."""

    name: str
    kind: str  # the operation, without the -start of an asynchronous one
    is_start: bool
    result: str
    attributes: str
    count: int


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    ``arrays`` gives dtype (as XLA writes it) and elements of what a gather makes or a reduce takes.
    CPUs send bfloat16 as float32: ``asked_dtype`` is what the program was written to send.
    """

    name: str
    kind: str
    arrays: tuple[tuple[str, int], ...]
    asked_dtype: str
    group: int  # devices that take part in it together
    count: int  # in a step

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
        """Return the collectives of one kind (see `KINDS`)."""
        return tuple(each for each in self.collectives if each.kind == kind)

    def __str__(self) -> str:
        alike: dict[tuple[object, ...], list[int]] = {}
        for each in self.collectives:
            dtypes = "+".join(dict.fromkeys(dtype for dtype, _ in each.arrays))
            if each.asked_dtype not in dtypes.split("+"):
                dtypes += f", asked for {each.asked_dtype}"
            numel = sum(numel for _, numel in each.arrays)
            sums = alike.setdefault((each.kind, dtypes, numel, each.group), [0, 0])
            sums[0] += each.count
            sums[1] += each.sent_bytes
        rows: list[tuple[object, ...]] = [(*what, *sums) for what, sums in alike.items()]
        rows.sort(key=lambda row: -int(str(row[-1])))
        head = ("collective", "dtype", "elements", "devices", "times a step", "bytes sent")
        total = f"\ntogether {bytes_text(self.sent_bytes)} a step sent by each device"
        return in_columns([head, *rows], right=(2, 3, 4, 5)) + total


def traffic_of(text: str, devices: int, asked: str = "") -> StepTraffic:
    """The collectives in a compiled program's text.

    ``asked`` is the program before compilation, in StableHLO, for the dtypes asked for. A loop
    whose length XLA does not know counts once.
    """
    known: dict[tuple[str, int], set[str]] = {}  # by kind, and elements of what it gives
    for kind, dims, dtype in _STABLE.findall(asked):
        numel = math.prod(int(dim) for dim in dims.split("x") if dim)
        dtypes = known.setdefault((kind.replace("_", "-"), numel), set())
        dtypes.add(_STABLE_DTYPES.get(dtype, dtype))
    collectives = []
    for each in (each for each in instructions(text) if each.kind in KINDS):
        group = _group_size(each.attributes, devices)
        arrays = [(dtype, _numel(dims)) for dtype, dims in _ARRAY.findall(each.result)]
        if each.is_start and each.kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # its operands stand before its results
        dtypes = known.get((each.kind, arrays[0][1]), set())
        asked_dtype = next(iter(dtypes)) if len(dtypes) == 1 else arrays[0][0]
        if each.kind == "reduce-scatter":
            arrays = [(dtype, group * numel) for dtype, numel in arrays]
        collectives.append(
            Collective(each.name, each.kind, tuple(arrays), asked_dtype, group, each.count)
        )
    return StepTraffic(tuple(collectives))


def instructions(text: str) -> Iterator[Instruction]:
    """All instructions of a compiled program, of the computations that it comes to.

    Raises:
        NotSupportedError: for a program with a collective that cannot be read.
    """
    mentioned = len(re.findall(rf"[=)}}\]] (?:{'|'.join(KINDS)})(?:-start)?\(", text))
    bodies, entry = _computations(text)
    read = sum(each.kind in KINDS for body in bodies.values() for each in body)
    if mentioned != read or not entry:
        raise NotSupportedError(
            f"the compiled program mentions {mentioned} collectives, of which {read} were read, "
            f"and its entry is {entry or 'not found'!r}: this XLA writes programs in a form that "
            "fullshard does not know; please report it with the versions of jax and jaxlib"
        )
    times = dict.fromkeys(bodies, 0)
    _count(entry, 1, bodies, times)
    for name, body in bodies.items():
        for each in body if times[name] else ():
            yield replace(each, count=times[name])


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, not counted yet, and which is the entry."""
    bodies: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            current = head.group(2)
            bodies[current] = []
            entry = current if head.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if found and current:
            name, result, kind, rest = found.groups()
            is_start, kind = kind.endswith("-start"), kind.removesuffix("-start")
            bodies[current].append(Instruction(name, kind, is_start, result, rest, 0))
    return bodies, entry


def _count(
    name: str, times: int, bodies: Mapping[str, Sequence[Instruction]], found: dict[str, int]
) -> None:
    if name not in found:
        return
    found[name] += times
    for each in bodies[name]:
        trips = _TRIPS.search(each.attributes)
        for how, several, one in _CALLEES.findall(each.attributes):
            inside = times * int(trips.group(1)) if how == "body" and trips else times
            for callee in re.findall(r"[\w.\-]+", several or one):
                _count(callee, inside, bodies, found)


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
