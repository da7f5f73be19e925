# SPDX-License-Identifier: Apache-2.0
"""What do sharding and an optimizer's step cost the host, on layers too small to count themselves?

    python benchmarks/host_time.py [--worlds 8 64 1024] [--units 64] [--rounds 7] [--out FILE.json]

A fake process group stands for the other ranks, and its collectives do nothing at all (see `wire`).
One thread. Microseconds of processor time, which other programs on the machine lengthen little, per
unit and step, beyond those of the plain model. The engines take turns in one run (A B C A B C ...);
a ratio is the median of those of its rounds.
"""

import argparse
import gc
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from wire import Silence

from fullshard.torch import FullyShardedDataParallel, fully_shard
from fullshard.wrap import ModuleWrapPolicy

WIDTH, STEPS = 16, 5
OPTIMIZERS = {
    "AdamW": {},
    "AdamW, foreach": {"foreach": True},
    "AdamW, fused": {"fused": True},
}


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def bottom_up(units, shard, **options):
    model = nn.Sequential(*(Layer() for _ in range(units)))
    for layer in model:
        shard(layer, **options)
    return shard(model, **options)


def wrapped(units, cls, policy, **options):
    model = nn.Sequential(*(Layer() for _ in range(units)))
    return cls(model, auto_wrap_policy=policy({Layer}), **options)


BASE, PEER = "plain", "FSDP2"
ENGINES = {
    BASE: lambda units: nn.Sequential(*(Layer() for _ in range(units))),
    "FSDP1": lambda units: wrapped(
        units,
        torch_fsdp.FullyShardedDataParallel,
        torch_fsdp.wrap.ModuleWrapPolicy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    ),
    PEER: lambda units: bottom_up(units, torch_fsdp.fully_shard),
    "fullshard, function": lambda units: bottom_up(units, fully_shard),
    "the same by element": lambda units: bottom_up(units, fully_shard, align="element"),
    "fullshard, wrapper": lambda units: wrapped(units, FullyShardedDataParallel, ModuleWrapPolicy),
}


def train_s(model):
    """Seconds of processor time of a forward and backward, the median of some."""
    inputs = torch.ones(2, WIDTH)
    times = []
    for _ in range(STEPS):
        begin = time.process_time()
        model(inputs).sum().backward()
        times.append(time.process_time() - begin)
        model.zero_grad()
    return statistics.median(times)


def optimizer_s(model, options):
    """The same of a step of AdamW."""
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    times = []
    for _ in range(STEPS + 1):  # the first makes the state
        begin = time.process_time()
        optimizer.step()
        times.append(time.process_time() - begin)
    model.zero_grad()
    return statistics.median(times[1:])


def measure(units, rounds):
    """For each question and engine: microseconds per unit, and the ratio to the peer's."""
    models = {name: make(units) for name, make in ENGINES.items()}
    for model in models.values():
        train_s(model)  # schedules are made, memory is there
    questions = {"forward and backward": train_s}
    for name, options in OPTIMIZERS.items():
        questions[name] = lambda model, options=options: optimizer_s(model, options)
    rows = []
    for question, ask in questions.items():
        found = {name: [] for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                gc.collect()
                found[name].append(ask(model))
        beyond = question == "forward and backward"
        for name, times in found.items():
            base = found[BASE] if beyond and name != BASE else [0.0] * rounds
            peer = [p - b for p, b in zip(found[PEER], base, strict=True)]
            own = [t - b for t, b in zip(times, base, strict=True)]
            rows.append(
                {
                    "question": question,
                    "engine": name,
                    "us_per_unit": 1e6 * statistics.median(own) / units,
                    "ratio_to_fsdp2": statistics.median(
                        o / p for o, p in zip(own, peer, strict=True)
                    ),
                }
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of FSDP1, about itself
    rows = []
    for world in args.worlds:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        with Silence().patched():
            rows += [{"world": world, **row} for row in measure(args.units, args.rounds)]
        dist.destroy_process_group()
    table = Table("ranks", "question", "engine", "us a unit", "of FSDP2's")
    for row in rows:
        compared = f"{row['ratio_to_fsdp2']:.2f}" if row["engine"] != BASE else ""
        us = f"{row['us_per_unit']:.0f}"
        table.add_row(str(row["world"]), row["question"], row["engine"], us, compared)
    Console().print(table)
    write_report(args.out, rows)


if __name__ == "__main__":
    main()
