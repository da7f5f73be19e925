# SPDX-License-Identifier: Apache-2.0
"""What do sharding and an optimizer's step cost the host, on layers too small to count themselves?

    python benchmarks/host_time.py [--worlds 8 64 1024] [--units 64] [--rounds 7] [--out FILE.json]
    python benchmarks/host_time.py --device cuda --worlds 8 64 [--out FILE.json]

A fake process group stands for the other ranks, and its collectives do nothing at all (see `wire`).
One thread. Microseconds of processor time, which other programs on the machine lengthen little, per
unit and step, beyond those of the plain model. The engines take turns in one run (A B C A B C ...);
a ratio is the median of those of its rounds.

With ``--device cuda`` each copy and cast is a launch, and the host's time is that of issuing them:
it waits for the device before and after what is timed, never within. `behind_us` is the longest
that the device had left to do then: with less than a thousand launches before it, the host has not
waited for room in the queue either. Two questions more are by the wall clock, from a device that is
idle to one that is idle again: a forward and backward over the fake group, and over NCCL with one
rank that computes in bf16 (so it gathers and frees like many), where it is also replayed as a CUDA
graph.
"""

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
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

from fullshard.torch import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    capture_step,
    fully_shard,
)
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


def plain(units, device):
    return nn.Sequential(*(Layer() for _ in range(units))).to(device)


def bottom_up(units, device, shard, **options):
    model = plain(units, device)
    for layer in model:
        shard(layer, **options)
    return shard(model, **options)


def wrapped(units, device, cls, policy, **options):
    return cls(plain(units, device), auto_wrap_policy=policy({Layer}), **options)


def fsdp1(units, device):
    wrapper, policy = torch_fsdp.FullyShardedDataParallel, torch_fsdp.wrap.ModuleWrapPolicy
    return wrapped(units, device, wrapper, policy, device_id=device, use_orig_params=True)


BASE, PEER = "plain", "FSDP2"
ENGINES = {
    BASE: plain,
    "FSDP1": fsdp1,
    PEER: partial(bottom_up, shard=torch_fsdp.fully_shard),
    "fullshard, function": partial(bottom_up, shard=fully_shard),
    "the same by element": partial(bottom_up, shard=fully_shard, align="element"),
    "fullshard, wrapper": partial(wrapped, cls=FullyShardedDataParallel, policy=ModuleWrapPolicy),
}


class Stopwatch:
    """Times what the host does, and for how long the device is then still busy."""

    def __init__(self, device):
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.behind_s = 0.0  # the most there was

    def host_s(self, run):
        """Seconds of processor time of ``run``, in which nobody waits for the device."""
        self._wait()
        begin = time.process_time()
        run()
        taken, at = time.process_time() - begin, time.perf_counter()
        self._wait()
        self.behind_s = max(self.behind_s, time.perf_counter() - at)
        return taken

    def wall_s(self, run):
        """Seconds by the clock on the wall until the device has done what ``run`` issues."""
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin


def batch_for(model):
    param = next(model.parameters())
    return torch.ones(2, WIDTH, device=param.device)


def step_s(model, clock):
    """Seconds of a forward and backward by ``clock``, the median of some."""
    inputs = batch_for(model)
    times = []
    for _ in range(STEPS):
        times.append(clock(lambda: model(inputs).sum().backward()))
        model.zero_grad()
    return statistics.median(times)


def optimizer_s(model, clock, options):
    """The same of a step of AdamW."""
    model(batch_for(model)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    times = [clock(optimizer.step) for _ in range(STEPS + 1)]  # the first makes the state
    model.zero_grad()
    return statistics.median(times[1:])


STEP = "forward and backward"
WALL = "forward and backward, by the wall clock"
QUESTIONS = {
    STEP: lambda model, watch: step_s(model, watch.host_s),
    WALL: lambda model, watch: step_s(model, watch.wall_s),
    **{
        name: lambda model, watch, options=options: optimizer_s(model, watch.host_s, options)
        for name, options in OPTIMIZERS.items()
    },
}


def measure(models, questions, rounds, device, world):
    """Yield for each question rows of all models: time per unit, and the ratio to the peer's."""
    units = len(models[BASE])
    for question, ask in questions.items():
        rows = []
        found = {name: [] for name in models}
        watches = {name: Stopwatch(device) for name in models}
        for _ in range(rounds):
            for name, model in models.items():
                gc.collect()
                found[name].append(ask(model, watches[name]))
        for name, times in found.items():
            base = found[BASE] if question == STEP and name != BASE else [0.0] * rounds
            peer = [p - b for p, b in zip(found[PEER], base, strict=True)]
            own = [t - b for t, b in zip(times, base, strict=True)]
            row = {
                "world": world,
                "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
                "question": question,
                "engine": name,
                "us_per_unit": 1e6 * statistics.median(own) / units,
                "ratio_to_fsdp2": statistics.median(o / p for o, p in zip(own, peer, strict=True)),
            }
            if device.type == "cuda" and question != WALL:
                row["behind_us"] = round(1e6 * watches[name].behind_s)
            rows.append(row)
        yield rows


def over_fake_ranks(world, units, rounds, device):
    """Yield rows of all engines, as one of ``world`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with Silence().patched():
        models = {name: make(units, device) for name, make in ENGINES.items()}
        for model in models.values():
            step_s(model, Stopwatch(device).host_s)  # schedules are made, memory is there
        yield from measure(models, QUESTIONS, rounds, device, world)
    dist.destroy_process_group()


# ---- as a CUDA graph ----------------------------------------------------------------------------


class Replayed(nn.Module):
    """A model whose forward and backward are replayed when it is called; their loss is given."""

    class Loss:
        def sum(self):
            return self

        def backward(self):
            pass

    def __init__(self, model, capture):
        super().__init__()
        self.model = model
        self._inputs = batch_for(model)
        self._replay = capture(model, lambda: model(self._inputs).sum().backward())

    def forward(self, inputs):
        self._inputs.copy_(inputs)
        self._replay()
        return self.Loss()


def captured_by_torch(model, step):
    """Capture a step by `torch.cuda.graphs`, as torch's page shows it."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def captured_by_fullshard(model, step):
    return capture_step(model, step).replay


def as_graphs(units, rounds, device):
    """Yield rows of one rank over NCCL; who cannot be captured as a graph has no row for it."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        theirs = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        ours = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        make = {
            BASE: plain,
            PEER: partial(bottom_up, shard=torch_fsdp.fully_shard, mp_policy=theirs),
            "fullshard, function": partial(bottom_up, shard=fully_shard, mp_policy=ours),
        }
        capture = {
            BASE: captured_by_torch,
            "fullshard, function": captured_by_fullshard,
            PEER: captured_by_torch,  # last: a capture that fails must not be in others' way
        }
        models = {name: engine(units, device) for name, engine in make.items()}
        for model in models.values():
            step_s(model, Stopwatch(device).wall_s)
        for name, how in capture.items():
            try:
                models[f"{name}, captured"] = Replayed(make[name](units, device), how)
            except Exception as error:
                print(f"{name} cannot be captured: {error}", file=sys.stderr)
        questions = {WALL: QUESTIONS[WALL]}
        yield from measure(models, questions, rounds, device, 1)
        del models
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of FSDP1, about itself
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    parts = [over_fake_ranks(world, args.units, args.rounds, device) for world in args.worlds]
    if device.type == "cuda":
        parts.append(as_graphs(args.units, args.rounds, device))
    rows = []
    for each in itertools.chain.from_iterable(parts):
        show(each)
        rows += each
        write_report(args.out, rows)  # what there is, should it be stopped


def show(rows):
    table = Table(
        "ranks", "engine", "us a unit", "of FSDP2's", "us behind", title=rows[0]["question"]
    )
    for row in rows:
        compared = f"{row['ratio_to_fsdp2']:.2f}" if row["engine"] != BASE else ""
        us = f"{row['us_per_unit']:.0f}"
        table.add_row(str(row["world"]), row["engine"], us, compared, str(row.get("behind_us", "")))
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
