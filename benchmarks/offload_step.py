# SPDX-License-Identifier: Apache-2.0
"""How long is a step whose parameters rest on the host, beside its updates and its copies alone?

    python benchmarks/offload_step.py [--shapes 8,1024,8 2,2048,4 8,4096,8] [--width 4096]
                                      [--rounds 5] [--steps 8] [--out FILE.json]

A stack of Llama's blocks on one GPU, in each shape (ranks, tokens, layers) as one rank of a fake
process group (see `wire.py`, and `gpu_step.py` for what that leaves out), computed in bf16, with
torch's fused AdamW on fp32 parameters in page-locked memory of the host. The ways to step take
turns in one run (A B C A B C ...); times are medians over rounds by the host's clock, of turns that
end when the device is done and every update made. Updates alone: the optimizer's step by itself,
gradients being there. Copies alone: this rank's parameters to the device twice, which is what
crosses one way. `of bound` is the step over the longer of these two: 1.1 is asked. Forward and
backward: those of the same model whose parameters rest on the device, from an idle device to an
idle one; with few tokens that is what the host takes to issue them. `of longest` is the step over
the longest of the three. Ends with status 2 where there is no GPU; `--device cpu` tries the logic,
and copies nothing.
"""

import argparse
import gc
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
SHAPES = ["8,1024,8", "2,2048,4", "8,4096,8"]


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
        for param in self.model.parameters():
            assert param.local is not None  # what is put off is made for who looks
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forward_and_backward_s(self, steps):
        """Seconds of these alone, the mean of some."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.model(*self.inputs).backward(self.grad)
            self.optimizer.zero_grad()
        self.wait()
        return (time.perf_counter() - begin) / steps

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
    """A row for each way to step, in one shape."""
    ways = {name: Running(options, beside, CPUOffloadPolicy()) for name, beside in WAYS.items()}
    on_device = Running(options, None)
    for running in (*ways.values(), on_device):
        running.turn_s(WARM_UP_STEPS)
    wire.fills = False
    alone = ways["after backward"]
    seconds = {name: [] for name in (*WAYS, "updates", "copies", "forward_and_backward")}
    for _ in range(options.rounds):
        for name, running in ways.items():
            seconds[name].append(running.turn_s(options.steps))
        seconds["updates"].append(alone.updates_s())
        seconds["copies"].append(alone.copies_s())
        took_s = on_device.forward_and_backward_s(options.steps)
        seconds["forward_and_backward"].append(took_s)
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
            "forward_and_backward_s": found["forward_and_backward"],
            "of_bound": found[name] / bound_s,
            "of_longest": found[name] / max(bound_s, found["forward_and_backward"]),
        }
        for name in WAYS
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="RANKS,TOKENS,LAYERS")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("offload_step: torch sees no GPU here; --device cpu tries the logic", file=sys.stderr)
        sys.exit(2)
    rows = []
    for shape in options.shapes:
        options.world, options.tokens, options.layers = map(int, shape.split(","))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
        wire = Wire()
        with wire.patched():
            rows += measure(options, wire)
        dist.destroy_process_group()
        gc.collect()
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
