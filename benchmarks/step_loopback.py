# SPDX-License-Identifier: Apache-2.0
"""How long is a step beside DDP, FSDP1 and FSDP2, on local ranks with no limit on the link?

    python benchmarks/step_loopback.py [--ranks 2] [--rounds 7] [--out FILE.json]

The engines take turns in one run (A B C D A B C D ...); the ratio of a row is the median of the
ratios of its rounds to FSDP2's. Transformer blocks of width 768, one sample of 64 tokens a rank,
fp32, AdamW (foreach) and no clipping in every engine.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.multiprocessing as mp
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fullshard.wrap import ModuleWrapPolicy

WIDTH, BLOCKS, TOKENS = 768, 6, 64


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(BLOCKS)
        )
    )


def bottom_up(shard):
    model = build()
    for block in model:
        shard(block)
    return shard(model)


def wrapped(cls, policy, **options):
    policy = policy({nn.TransformerEncoderLayer})
    return cls(build(), auto_wrap_policy=policy, use_orig_params=True, **options)


ENGINES = {
    "plain, no communication": build,
    "DDP": lambda: DistributedDataParallel(build()),
    "FSDP1": lambda: wrapped(
        torch_fsdp.FullyShardedDataParallel,
        torch_fsdp.wrap.ModuleWrapPolicy,
        device_id=torch.device("cpu"),
    ),
    "FSDP2": lambda: bottom_up(torch_fsdp.fully_shard),
    "fullshard FULL_SHARD": lambda: bottom_up(fully_shard),
    "fullshard SHARD_GRAD_OP": lambda: wrapped(
        FullyShardedDataParallel,
        ModuleWrapPolicy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    ),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> float:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def rank_main(rank: int, world: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    running = {}
    for name, make in ENGINES.items():
        model = make()
        running[name] = model, torch.optim.AdamW(model.parameters(), foreach=True)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    losses = {}
    for _ in range(rounds + 2):  # the first two warm up: they record the order of units
        for name, (model, optimizer) in running.items():
            dist.barrier()
            start = time.perf_counter()
            losses[name] = step(model, optimizer, inputs)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        rows = {name: {"seconds": each[2:], "loss": losses[name]} for name, each in seconds.items()}
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options.ranks, folder, options.rounds), nprocs=options.ranks)
        rows = json.loads(Path(folder, "rows.json").read_text())
    numel = sum(p.numel() for p in build().parameters())
    table = Table("engine", "ms a step", "throughput of FSDP2's", "last loss")
    for name, row in rows.items():
        paired = zip(rows["FSDP2"]["seconds"], row["seconds"], strict=True)
        row["throughput_ratio"] = statistics.median(theirs / ours for theirs, ours in paired)
        row["median_s"] = statistics.median(row["seconds"])
        table.add_row(
            name,
            f"{row['median_s'] * 1e3:.0f}",
            f"{row['throughput_ratio']:.2f}",
            f"{row['loss']:.6f}",
        )
    table.title = f"{numel / 1e6:.1f} M parameters, {options.ranks} ranks"
    Console().print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
