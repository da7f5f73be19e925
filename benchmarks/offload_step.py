# SPDX-License-Identifier: Apache-2.0
"""How long is a step whose parameters rest on the host, beside its updates and its copies alone?

    python benchmarks/offload_step.py [--world 8] [--tokens 1024] [--layers 8] [--width 4096]
                                      [--rounds 5] [--steps 4] [--out FILE.json]

A stack of Llama's blocks on one GPU, as one of ``world`` ranks of a fake process group (see
`wire.py`, and `gpu_step.py` for what that leaves out), computed in bf16, with torch's fused AdamW
on fp32 parameters in page-locked memory of the host. The ways to step take turns in one run (A B C
A B C ...); times are medians over rounds by the host's clock, of turns that end when the device is
done. Updates alone: the optimizer's step by itself, gradients being there. Copies alone: this
rank's parameters to the device twice, which is what crosses one way. `of bound` is the step over
the longer of these two: 1.1 is asked. `launch s` is how long the host takes to issue forward and
backward of the same model whose parameters rest on the device, which nothing can hide from a step
that the same host updates: with few tokens or small units it is more than either. Ends with status
2 where there is no GPU; `--device cpu` tries the logic, and copies nothing.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from default_configuration import adamw, fullshard
from llama import COMPUTE, Block, build, make_inputs
from report import write_report
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from wire import Wire

from fullshard.torch import CPUOffloadPolicy, overlap_optimizer

WAYS = {"after backward": None, "beside forward": "forward", "beside backward": "backward"}
WARM_UP_STEPS = 4


class Running:
    def __init__(self, options, beside, policy=None):
        self.device = torch.device(options.device)
        further = {} if policy is None else {"offload_policy": policy}
        self.model = fullshard(build(options), Block, COMPUTE, **further)
        self.optimizer = adamw(self.model.parameters())
        if beside is not None:
            overlap_optimizer(self.model, self.optimizer, beside=beside)
        self.inputs, self.grad = make_inputs(options.tokens, options)

    def turn_s(self, steps):
        """Seconds of a step, the mean of some."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.model(*self.inputs).backward(self.grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.wait()
        return (time.perf_counter() - begin) / steps

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def launch_s(self):
        """Seconds until forward and backward are issued, by a host that does not wait."""
        self.wait()
        begin = time.perf_counter()
        self.model(*self.inputs).backward(self.grad)
        took_s = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return took_s

    def updates_s(self):
        """Seconds of the optimizer's step alone, of one that steps after backward."""
        self.model(*self.inputs).backward(self.grad)
        self.wait()
        begin = time.perf_counter()
        self.optimizer.step()
        took_s = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return took_s

    def copies_s(self):
        """Seconds in which this rank's parameters cross to the device twice."""
        spans = [param.local.detach() for param in self.model.parameters()]
        there = [torch.empty_like(span, device=self.device) for span in spans]
        self.wait()
        begin = time.perf_counter()
        for _ in range(2):
            for to, span in zip(there, spans, strict=True):
                to.copy_(span, non_blocking=True)
        self.wait()
        return time.perf_counter() - begin


def measure(options, wire):
    """A row for each way to step."""
    ways = {name: Running(options, beside, CPUOffloadPolicy()) for name, beside in WAYS.items()}
    on_device = Running(options, None)
    for running in (*ways.values(), on_device):
        running.turn_s(WARM_UP_STEPS)
    wire.fills = False
    alone = ways["after backward"]
    seconds = {name: [] for name in (*WAYS, "updates", "copies", "launch")}
    for _ in range(options.rounds):
        for name, running in ways.items():
            seconds[name].append(running.turn_s(options.steps))
        seconds["updates"].append(alone.updates_s())
        seconds["copies"].append(alone.copies_s())
        seconds["launch"].append(on_device.launch_s())
    found = {name: statistics.median(each) for name, each in seconds.items()}
    bound_s = max(found["updates"], found["copies"])
    shape = {name: getattr(options, name) for name in ("world", "tokens", "layers", "width")}
    return [
        {
            **shape,
            "step": name,
            "step_s": found[name],
            "updates_s": found["updates"],
            "copies_s": found["copies"],
            "launch_s": found["launch"],
            "of_bound": found[name] / bound_s,
        }
        for name in WAYS
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("offload_step: torch sees no GPU here; --device cpu tries the logic", file=sys.stderr)
        sys.exit(2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    wire = Wire()
    with wire.patched():
        rows = measure(options, wire)
    dist.destroy_process_group()
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
