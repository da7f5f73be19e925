# SPDX-License-Identifier: Apache-2.0
"""How fast are the engine's gathers and reduces beside torch.distributed's own, on Gloo?

    python benchmarks/collectives.py [--ranks 2 4] [--rounds 9] [--out FILE.json]

Starts local processes. Ours and torch's alternate in one run; a row is the median of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.torch.comm.process_group import ProcessGroupComm

SIZES = (1 << 16, 1 << 21, 1 << 24)  # elements of float32


def measure(numel: int, rounds: int) -> dict[str, float]:
    """Median seconds of each way to gather and to reduce ``numel`` elements."""
    group = dist.group.WORLD
    comm = ProcessGroupComm(group)
    full, shard = torch.ones(numel), torch.ones(numel // comm.size)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ways = {
        "gather": lambda: comm.all_gather([(full, shard)]).wait(),
        "torch gather": lambda: gather(full, shard),
        "reduce": lambda: comm.reduce_scatter([(shard, full)]).wait(),
        "torch reduce": lambda: reduce(shard, full),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def rank_main(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    rows = [{"ranks": world, "numel": numel, **measure(numel, rounds)} for numel in SIZES]
    if rank == 0:
        Path(folder, f"rows-{world}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in options.ranks:
            mp.spawn(rank_main, (world, folder, options.rounds), nprocs=world)
            rows += json.loads(Path(folder, f"rows-{world}.json").read_text())
    table = Table("ranks", "MiB", "gather", "torch's", "reduce", "torch's", title="milliseconds")
    for row in rows:
        times = [row[k] for k in ("gather", "torch gather", "reduce", "torch reduce")]
        mib = row["numel"] * 4 / 2**20
        table.add_row(str(row["ranks"]), f"{mib:g}", *(f"{t * 1e3:.2f}" for t in times))
    Console().print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
