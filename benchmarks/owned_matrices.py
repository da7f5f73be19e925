# SPDX-License-Identifier: Apache-2.0
"""How even is the work of Muon over owned matrices, and how much do they pad? Computed.

    python benchmarks/owned_matrices.py [--models llama3-8b llama3-405b] [--ranks 8 64 512]
                                        [--out FILE.json]

The matrices of all blocks are dealt out together, as by the wrapper and `WholeMatrices`. Work is
that of the rank with the most over the mean, in FLOPs of Muon; the bound is that of the largest
matrix, which no way of dealing out whole matrices goes below. Memory is that of the rank with the
most elements of matrices over the mean. Padding is what lies between matrices.
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


def row(model, ranks):
    blocks, loads = blocks_of(model), [0.0] * ranks
    specs = [spec for block in blocks for spec in block]
    works = [muon_work(spec.shape) for spec in specs]
    owners = iter(deal_out(works, loads))
    held, padding = [0] * ranks, 0
    for block in blocks:
        owned = [replace(spec, owner=next(owners)) for spec in block]
        padding += sum(segment.padding_numel for segment in lay_out(owned, ranks).segments)
        for spec in owned:
            held[spec.owner] += spec.numel
    mean, numel = sum(works) / ranks, sum(held)
    return {
        "model": model,
        "ranks": ranks,
        "work_over_mean": max(loads) / mean,
        "bound": max(1.0, max(works) / mean),
        "memory_over_mean": max(held) / (numel / ranks),
        "padding_percent": 100 * padding / numel,
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
