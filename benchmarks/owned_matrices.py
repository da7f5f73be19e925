# SPDX-License-Identifier: Apache-2.0
"""How even is the work of Muon over owned matrices, and how much do they pad? Computed.

    python benchmarks/owned_matrices.py [--models llama3-8b llama3-405b] [--ranks 8 64 512]
                                        [--out FILE.json]

The matrices of all blocks are dealt out together, as by the wrapper and `WholeMatrices`, or unit by
unit, as `fully_shard` sees them. Work is that of the rank with the most over the mean, in FLOPs of
Muon; the bound is that of the largest matrix, which no way of dealing out whole matrices goes
below. Memory is that of the rank with the most elements of matrices over the mean. Padding is what
lies between matrices.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import lay_out
from fullshard.plan import Run, cluster_of, named_device, read_model
from fullshard.plan.step.units import units_of

MODELS = ["gpt2-124m", "gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b"]
RANKS = [8, 64, 512, 4096, 16_384]


def blocks_of(model):
    """The matrices of each block; the root has embeddings and the head, which AdamW steps."""
    one_device = cluster_of(named_device("h100"), 8)
    _, *units = units_of(read_model(model), Run(), one_device)
    matrices = [[slot.spec for _, slot in unit.layout] for unit in units]
    return [[spec for spec in block if len(spec.shape) == 2] for block in matrices]


def dealt(units, ranks):
    """Return, for units dealt out one behind the other, what each rank has: work, and elements."""
    loads, held, padding = [0.0] * ranks, [0] * ranks, 0
    for unit in units:
        owners = deal_out([muon_work(spec.shape) for spec in unit], loads)
        owned = [replace(spec, owner=rank) for spec, rank in zip(unit, owners, strict=True)]
        padding += sum(segment.padding_numel for segment in lay_out(owned, ranks).segments)
        for spec in owned:
            held[spec.owner] += spec.numel
    return loads, held, padding


def over_mean(values):
    return max(values) * len(values) / sum(values)


def row(model, ranks):
    blocks = blocks_of(model)
    specs = [spec for block in blocks for spec in block]
    works = [muon_work(spec.shape) for spec in specs]
    loads, held, _ = dealt([specs], ranks)
    loads_by_unit, held_by_unit, padding = dealt(blocks, ranks)
    return {
        "model": model,
        "ranks": ranks,
        "work_over_mean": over_mean(loads),
        "unit_by_unit": over_mean(loads_by_unit),
        "bound": max(1.0, max(works) * ranks / sum(works)),
        "memory_over_mean": over_mean(held),
        "memory_unit_by_unit": over_mean(held_by_unit),
        "padding_percent": 100 * padding / sum(held),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--out", type=Path, help="write JSON here, too")
    options = parser.parse_args()
    found = [row(model, ranks) for model in options.models for ranks in options.ranks]
    table = Table(*found[0])
    for each in found:
        values = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in each.values()]
        table.add_row(*values)
    Console().print(table)
    write_report(options.out, found)


if __name__ == "__main__":
    main()
