# SPDX-License-Identifier: Apache-2.0
"""How much padding and how many messages does each layout cost? Computed, for known models.

    python benchmarks/layouts.py [--models llama3-8b llama3-70b] [--ranks 8 64 1024 16384]

Units are the model's blocks and what is left over. A message is one tensor of a unit's coalesced
gather. Copied is what a gather puts in order behind its arrival. Padding is what a rank stores, and
sends, beyond its share. Parameters rest in fp32.
"""

import argparse
from pathlib import Path

from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.plan import Run, cluster_of, named_device, read_model
from fullshard.plan.step.units import units_of

MODELS = ["gpt2-124m", "llama3-8b", "llama3-70b"]
RANKS = [8, 64, 512, 4096, 16_384]


def row(name: str, ranks: int, align: str) -> dict[str, object]:
    units = units_of(read_model(name), Run(align=align), cluster_of(named_device("h100"), ranks))
    layouts = [unit.layout for unit in units]
    block = layouts[-1]
    exact = sum(slot.spec.bytes for layout in layouts for _, slot in layout) / ranks
    slices = [segment.slice_bytes for segment in block.segments]
    return {
        "model": name,
        "ranks": ranks,
        "align": align,
        "messages": len(block.segments),
        "smallest_slice_bytes": min(slices),
        "copied_bytes": block.staged_bytes,
        "padding": sum(layout.shard_bytes for layout in layouts) / exact - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--out", type=Path, help="write JSON here, too")
    args = parser.parse_args()
    rows = [
        row(name, ranks, align)
        for name in args.models
        for ranks in args.ranks
        for align in ("element", "row")
    ]
    table = Table(
        "model", "ranks", "layout", "messages a block", "smallest slice", "copied", "padding"
    )
    for each in rows:
        table.add_row(
            each["model"],
            f"{each['ranks']:,}",
            each["align"],
            str(each["messages"]),
            f"{each['smallest_slice_bytes']:,} B",
            f"{each['copied_bytes']:,} B",
            f"{each['padding']:.3%}",
        )
    Console(width=110).print(table)
    write_report(args.out, rows)


if __name__ == "__main__":
    main()
