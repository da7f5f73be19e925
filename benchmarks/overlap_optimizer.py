# SPDX-License-Identifier: Apache-2.0
"""What does it bring to step the optimizer in backward, on two hosts with slow links?

    sudo python benchmarks/overlap_optimizer.py [--rate-mbit 2000] [--rounds 9]
                                                [--out FILE.json]

The same model, twice, in the configuration that `default_configuration` names: stepped after
backward, and with `overlap_optimizer`. They take turns in one run (A B A B ...); the ratio is the
median of those of the rounds. Hosts are network namespaces of this machine (see `netlab`), one rank
on each; with ``--rate-mbit 0`` two ranks on this machine, without a limit. Ends with status 2 where
there can be no such hosts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import netlab
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from default_configuration import adamw, fullshard
from report import write_report
from rich.console import Console
from rich.table import Table
from training_step import BLOCK, TOKENS, WARM_UP_ROUNDS, WIDTH, build, step, throughput_ratio

from fullshard.torch import resting_bytes
from fullshard.torch.optim import overlap_optimizer

RANKS = 2
ORDINARY, OVERLAPPED = "after backward", "in backward"


def gradient_bytes(model, optimizer, inputs):
    """Bytes of gradient shards that a backward leaves."""
    model(inputs).square().mean().backward()
    held = resting_bytes(model, optimizer).gradients_bytes
    optimizer.step()
    model.zero_grad()
    return held


def rank_main(rank, options, folder, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    running = {}
    for name in (ORDINARY, OVERLAPPED):
        model = fullshard(build(), BLOCK)
        optimizer = adamw(model.parameters())
        if name == OVERLAPPED:
            overlap_optimizer(model, optimizer)
        running[name] = model, optimizer
    found = {name: {"seconds": [], "loss": 0.0} for name in running}
    for _ in range(WARM_UP_ROUNDS + options.rounds):
        for name, (model, optimizer) in running.items():
            dist.barrier()
            start = time.perf_counter()
            found[name]["loss"] = step(model, optimizer, inputs)
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - start)
    for name, row in found.items():
        row["seconds"] = row["seconds"][WARM_UP_ROUNDS:]
        row["gradient_bytes"] = gradient_bytes(*running[name], inputs)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(options, folder):
    if not options.rate_mbit:
        store = f"file://{folder}/store"
        mp.spawn(rank_main, (options, folder, store), nprocs=RANKS)
    else:
        with netlab.Netlab(RANKS, options.rate_mbit) as lab:
            for rank in range(RANKS):
                as_rank = ["--as-rank", str(rank), "--folder", folder]
                lab.start(rank, [sys.executable, __file__, *sys.argv[1:], *as_rank])
            lab.wait()
    return json.loads(Path(folder, "rows.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate-mbit", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        rank_main(options.as_rank, options, options.folder, f"tcp://{netlab.address(0)}:29500")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = measure(options, folder)
        except netlab.Unavailable as reason:
            print(f"no hosts with slow links here: {reason}", file=sys.stderr)
            sys.exit(2)
    table = Table("step", "ms", "throughput of ordinary", "MB of gradients left", "last loss")
    for name, row in found.items():
        row["throughput_ratio"] = throughput_ratio(row["seconds"], found[ORDINARY]["seconds"])
        row["rate_mbit"] = options.rate_mbit
        row["median_s"] = statistics.median(row["seconds"])
        table.add_row(
            name,
            f"{row['median_s'] * 1e3:.0f}",
            f"{row['throughput_ratio']:.3f}",
            f"{row['gradient_bytes'] / 1e6:.1f}",
            f"{row['loss']:.6f}",
        )
    Console().print(table)
    write_report(options.out, found)


if __name__ == "__main__":
    main()
