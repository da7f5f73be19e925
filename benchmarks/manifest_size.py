# SPDX-License-Identifier: Apache-2.0
"""What does the manifest of a 70B model with AdamW cost?

    python benchmarks/manifest_size.py --out benchmarks/results/manifest_size.json

Rank 0's part of a save, with the messages of all other ranks made up; no weights are written. The
model is cut as the engine cuts it (a unit a layer, by elements or rows). Plan: from the proposals
of all to the decision who writes what, at the first save of a layout; make: from the files of all
to the step that can be seen; read: the manifest alone. Memory: the most beyond the bare process's.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy
from report import in_own_process, write_report
from rich.console import Console
from rich.table import Table

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.envelope import checksum_of
from fullshard.checkpoint.format.manifest import MANIFEST, parse_manifest
from fullshard.checkpoint.format.tiling import Slicing, Tile, boxes_of_part, part_numels
from fullshard.checkpoint.planning import Plans
from fullshard.checkpoint.runs.commit import Staging
from fullshard.checkpoint.saving import About, publish
from fullshard.checkpoint.shards import Piece
from fullshard.core.boxes import Box
from fullshard.core.layout import lay_out
from fullshard.core.spec import ParamSpec

LAYERS, WIDTH, HIDDEN, VOCABULARY, KEYS = 80, 8192, 28672, 128256, 1024
HEADER_BYTES, RANDOM_BYTES = 2**19, 5100
KINDS = ("model", "optimizer/exp_avg/model", "optimizer/exp_avg_sq/model")


def units():
    """Shape by name of each parameter, unit by unit."""
    block = {
        "q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH),
        "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN),
        "norm_1": (WIDTH,), "norm_2": (WIDTH,),
    }  # fmt: skip
    for n in range(LAYERS):
        yield {f"layers.{n}.{name}": shape for name, shape in block.items()}
    yield {"embed": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}


def pieces_of(rank, ranks, align):
    """Everything that a rank has to save, without its values."""
    nothing = None  # no source: nothing is written
    pieces = []
    for unit in units():
        specs = [ParamSpec(name, shape) for name, shape in unit.items()]
        for segment, slot in lay_out(specs, ranks, align=align):
            spans, shape = segment.spans(slot), slot.spec.shape
            tile = Tile((Slicing(None, spans.start, spans.slice_numel, ranks),), rank)
            boxes = boxes_of_part(shape, tile.slicings, rank)
            pieces += [
                Piece(f"{kind}/{slot.spec.name}", shape, "F32", boxes, nothing, tile)
                for kind in KINDS
            ]
            step = f"optimizer/step/model/{slot.spec.name}"
            pieces.append(Piece(step, (), "F32", (Box((), ()),), nothing, Tile((), 0)))
    own = (RANDOM_BYTES,)
    return [*pieces, Piece(f"random/{rank}", own, "U8", (Box((0,), own),), nothing)]


class AllRanks:
    """Rank 0 of many; the others say the same, but for their number."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def share(self, data):
        return [data]

    def broadcast(self, data):
        return data

    def gather(self, data):
        """The first words of all ranks; of their tensors rank 0's are all that there are."""
        told = json.loads(data)
        if not isinstance(told[0], str):
            return [data]
        digest, indices, [[_, *random]] = told
        assert indices == [0, 0]  # of what is cut, and of what all have
        return [
            json.dumps([digest, [rank, 0], [[f"random/{rank}", *random]]]).encode()
            for rank in range(self.size)
        ]


def measure(ranks, align):
    pieces = pieces_of(0, ranks, align)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    plan = Plans().plan(pieces, AllRanks(ranks))
    plan_s = time.perf_counter() - begin
    held = numpy.full(ranks, RANDOM_BYTES)
    for tensor in plan.tensors.values():
        if tensor.tiling is not None:
            sizes = part_numels(tensor.shape, tensor.tiling.slicings) * tensor.item_bytes
            held[: len(sizes)] += sizes
    parts = [{"file": _file(rank, int(held[rank]))} for rank in range(ranks)]
    about = About(1, state={"groups": [{"params": [piece.name for piece in pieces]}]})
    with tempfile.TemporaryDirectory() as folder:
        staging = Staging(Files(), Path(folder), "0" * 32)
        staging.open()
        begin = time.perf_counter()
        path = publish(staging, about, plan.tensors, parts)
        make_s = time.perf_counter() - begin
        path /= MANIFEST
        data = path.read_bytes()
        begin = time.perf_counter()
        parse_manifest(data, path)
        read_s = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "ranks": ranks,
        "cut_by": align,
        "tensors": len(plan.tensors),
        "manifest_bytes": len(data),
        "plan_seconds": plan_s,
        "make_seconds": make_s,
        "read_seconds": read_s,
        "memory_bytes": (peak - before) * 1024,
    }


def _file(rank, held):
    """The facts of a file; checksums are made up."""
    name = f"{rank:05d}.safetensors"
    table = -(-held // 2**22) * 16
    checksums = checksum_of(name.encode()), checksum_of(f"{name} table".encode())
    return [name, HEADER_BYTES + held + table, HEADER_BYTES, checksums[0], table, checksums[1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16_384])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(int(options.case[0]), options.case[1])))
        return
    rows = []
    for ranks in options.ranks:
        for align in ("element", "row"):
            rows.append(in_own_process(__file__, ranks, align))
    table = Table("ranks", "cut by", "tensors", "MB", "plan s", "make s", "read s", "memory MB")
    for row in rows:
        seconds = (f"{row[f'{what}_seconds']:.2f}" for what in ("plan", "make", "read"))
        megabytes = [f"{row[f'{what}_bytes'] / 1e6:.1f}" for what in ("manifest", "memory")]
        told = str(row["ranks"]), row["cut_by"], str(row["tensors"]), megabytes[0]
        table.add_row(*told, *seconds, megabytes[1])
    Console().print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
