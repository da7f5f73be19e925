# SPDX-License-Identifier: Apache-2.0
"""How long is a step beside DDP, FSDP1 and FSDP2, on local ranks with no limit on the link?

    python benchmarks/step_loopback.py [--ranks 2] [--rounds 7] [--out FILE.json]

The engines take turns in one run (A B C D, C A D B, ...), in the configuration that
`default_configuration` names; the ratio of a row is the median of the ratios of its rounds to
FSDP2's. Transformer blocks of width 768, one sample of 64 tokens a rank, fp32.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from default_configuration import ddp, fsdp1, fsdp2, fullshard
from report import write_report
from rich.console import Console
from rich.table import Table
from training_step import BLOCK, build, take_turns, throughput_ratio

ALONE, PEER = "plain, no communication", "FSDP2"
ENGINES = {
    ALONE: build,
    "DDP": lambda: ddp(build()),
    "FSDP1": lambda: fsdp1(build(), BLOCK),
    PEER: lambda: fsdp2(build(), BLOCK),
    "fullshard FULL_SHARD": lambda: fullshard(build(), BLOCK),
    "fullshard SHARD_GRAD_OP": lambda: fullshard(build(), BLOCK, reshard_after_forward=False),
}


def rank_main(rank, world, folder, rounds):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = take_turns(ENGINES, ALONE, rounds)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options.ranks, folder, options.rounds), nprocs=options.ranks)
        found = json.loads(Path(folder, "rows.json").read_text())
    numel = sum(p.numel() for p in build().parameters())
    table = Table("engine", "ms a step", "throughput of FSDP2's", "last loss")
    rows = {}
    for name, row in found.items():
        seconds, loss = row["seconds"], row["losses"][-1]
        ratio = throughput_ratio(seconds, found[PEER]["seconds"])
        median = statistics.median(seconds)
        rows[name] = {
            "seconds": seconds,
            "loss": loss,
            "throughput_ratio": ratio,
            "median_s": median,
        }
        table.add_row(name, f"{median * 1e3:.0f}", f"{ratio:.2f}", f"{loss:.6f}")
    table.title = f"{numel / 1e6:.1f} M parameters, {options.ranks} ranks"
    Console().print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
