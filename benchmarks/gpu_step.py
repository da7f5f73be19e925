# SPDX-License-Identifier: Apache-2.0
"""What does sharding cost a step on one GPU, beside the plain model and FSDP2, but for the network?

    python benchmarks/gpu_step.py [--worlds 1 8 64] [--tokens 2048 8192 16384] [--out FILE.json]

A stack of Llama's blocks (by default those of its 8B model) in bf16, with fp32 masters in AdamW.
The engines take turns in one run (A B C D A B C D ...), in the configuration that
`default_configuration` names; ratios are medians over rounds of the ratios of times within a round.
The plain model's weights are bf16 and need no casts, and its optimizer holds and updates fp32
masters of 1/N of its parameters: what no step of a rank among N can be faster than. Each world has
a process of its own.

A fake process group stands for the other ranks (see `wire.py`). Streams, events, casts, copies and
memory are what they are with NCCL, but nothing is sent. So that the group's own copies are in no
figure, a gather writes nothing while time is taken, beside what an engine puts there itself: what
other ranks would have sent is what the memory held before. For that to be weights or gradients of
earlier steps, what engines gather into comes from memory pools where nothing else is. A reduce
copies this rank's slice, on a stream of its own, as NCCL's, or on the engine's if that waits for
it. All this is the same for FSDP2 and fullshard. `finite` says that outputs were numbers to the
end.

Copies: copy, concatenation and cast kernels and device-to-device copies of forward and backward
beyond those of the plain model, for each unit, and their time, by the profiler; a reduce's copy of
a slice is one of them. Memory: the caching allocator's peaks over steps when the model is alone and
warm, from an empty cache, without those pools; in the columns that begin with `pool`, with
`use_memory_pool`. Ends with status 2 where there is no GPU; `--device cpu` tries the logic.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from default_configuration import adamw, fsdp2, fullshard
from llama import COMPUTE, Block, build, make_inputs
from report import write_report
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_step import part_of
from wire import PooledAllGather, Wire

from fullshard.torch import use_memory_pool

PLAIN, COMPILED, PEER, OURS = "plain", "plain, compiled", "FSDP2", "fullshard"
WARM_UP_STEPS = 4  # the first records the order of units, the second is the first to follow it


# ---- engines ------------------------------------------------------------------------------------


def gather_into_pools(engines):
    """Let what the engines gather into come from pools; for the rest of the process."""
    use_memory_pool(engines[OURS].model)
    shared = PooledAllGather()
    for block in engines[PEER].model.blocks:
        block.set_custom_all_gather(shared)


class Masters:
    """AdamW on fp32 copies of ``params``, whose new values they get."""

    def __init__(self, params):
        self._params = list(params)
        self._masters = [p.detach().float().requires_grad_() for p in self._params]
        self._adamw = adamw(self._masters)

    def step(self):
        for master, param in zip(self._masters, self._params, strict=True):
            master.grad = param.grad.float()
        self._adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self._params, self._masters)
        self._adamw.zero_grad()


class Running:
    """A model with its optimizer, and what a step of them is."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, inputs, grad):
        output = self.model(*inputs)
        output.backward(grad)
        self.optimizer.step()
        self.model.zero_grad()
        return output


def make_plain(options, world, compiled=False):
    model = build(options, COMPUTE)
    optimizer = Masters(part_of(model.parameters(), world))
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False, backend=options.backend)
    return Running(model, optimizer)


def make_sharded(shard, options, world):
    model = shard(build(options), Block, COMPUTE)
    return Running(model, adamw(model.parameters()))


ENGINES = {
    PLAIN: make_plain,
    COMPILED: partial(make_plain, compiled=True),
    PEER: partial(make_sharded, fsdp2),
    OURS: partial(make_sharded, fullshard),
}


# ---- time, copies, memory -----------------------------------------------------------------------


def turn_s(running, inputs, grad, steps):
    """Seconds of a step, the mean of some, by the device's clock."""
    gc.collect()
    if not grad.is_cuda:
        start = time.perf_counter()
        for _ in range(steps):
            running.step(inputs, grad)
        return (time.perf_counter() - start) / steps
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        running.step(inputs, grad)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def times(engines, tokens, wire, options):
    """For each engine: seconds of a step in each round, and if outputs were finite to the end."""
    inputs, grad = make_inputs(tokens, options)
    wire.fills = True
    for running in engines.values():
        turn_s(running, inputs, grad, WARM_UP_STEPS)
    wire.fills = not grad.is_cuda  # a CPU has no pools
    found = {name: {"seconds": []} for name in engines}
    for _ in range(options.rounds):
        for name, running in engines.items():
            found[name]["seconds"].append(turn_s(running, inputs, grad, options.steps))
    for name, running in engines.items():
        found[name]["finite"] = str(running.step(inputs, grad).isfinite().all().item())
    return found


COPY_NAMES = (
    "memcpy dtod",
    "copy_kernel",
    "copyfunctor",
    "catarraybatched",
    "chunk_cat",
    "split_with_sizes_copy",
)
COPY_OPS = ("aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::split_with_sizes_copy")


def is_copy(name, device):
    """True for the name of a kernel (on a CPU, of an operator) that only moves or casts data."""
    if device == "cpu":
        return name in COPY_OPS or name == "fsdp::chunk_cat"
    return any(part in name.lower() for part in COPY_NAMES)


def copies(running, inputs, grad, device):
    """How many copies forward and backward make, and their seconds on the device."""
    running.step(inputs, grad)
    cuda = device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=activities) as profile:
        running.model(*inputs).backward(grad)
        if cuda:
            torch.cuda.synchronize()
    running.model.zero_grad()
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    found = [
        event
        for event in profile.events()
        if event.device_type == wanted and is_copy(event.name, device)
    ]
    return len(found), sum(event.time_range.elapsed_us() for event in found) / 1e6


def copies_per_unit(engines, tokens, options):
    """For each sharded engine: copies beyond the plain model's, and seconds, a unit."""
    inputs, grad = make_inputs(tokens, options)
    units = options.layers
    plain, plain_s = copies(engines[PLAIN], inputs, grad, options.device)
    found = {}
    for name in (PEER, OURS):
        number, number_s = copies(engines[name], inputs, grad, options.device)
        found[name] = {
            "copies_per_unit": (number - plain) / units,
            "copy_per_unit_s": (number_s - plain_s) / units,
        }
    return found


def memory(make, options, world, pool=False):
    """By tokens: peaks of a warm step of an engine that is alone, and reserved over allocated."""
    found = {}
    running = make(options, world)
    if pool:
        use_memory_pool(running.model)
    for tokens in options.tokens:
        gc.collect()
        torch.cuda.empty_cache()
        inputs, grad = make_inputs(tokens, options)
        for _ in range(WARM_UP_STEPS):
            running.step(inputs, grad)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            running.step(inputs, grad)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        found[tokens] = {
            "peak_allocated_bytes": allocated,
            "peak_reserved_bytes": reserved,
            "reserved_over_allocated": reserved / allocated,
        }
        del inputs, grad
    del running
    gc.collect()
    torch.cuda.empty_cache()
    return found


# ---- the table ----------------------------------------------------------------------------------


def paired(seconds: Sequence[float], of: Sequence[float]) -> float:
    """The median over rounds of this one's time over the other's: below 1 is faster."""
    return statistics.median(s / o for s, o in zip(seconds, of, strict=True))


def measure(world, options):
    """A row for each number of tokens and engine."""
    cuda = options.device == "cuda"
    wire = Wire()
    makers = {name: make for name, make in ENGINES.items() if name != COMPILED or options.compiles}
    with wire.patched():
        held = {name: memory(make, options, world) if cuda else {} for name, make in makers.items()}
        if cuda:  # last of these, since from here on there is a pool
            for tokens, row in memory(ENGINES[OURS], options, world, pool=True).items():
                held[OURS][tokens] |= {f"pool_{key}": value for key, value in row.items()}
        engines = {name: make(options, world) for name, make in makers.items()}
        if cuda:
            gather_into_pools(engines)
        found = {tokens: times(engines, tokens, wire, options) for tokens in options.tokens}
        # Last, since what the profiler leaves behind slows launches.
        counted = copies_per_unit(engines, options.tokens[0], options)
    rows = []
    for tokens, of_engines in found.items():
        for name, row in of_engines.items():
            seconds = row["seconds"]
            rows.append(
                {
                    "device": torch.cuda.get_device_name() if cuda else "cpu",
                    "world": world,
                    "tokens": tokens,
                    "engine": name,
                    "step_s": statistics.median(seconds),
                    "time_of_plain": paired(seconds, of_engines[PLAIN]["seconds"]),
                    "time_of_fsdp2": paired(seconds, of_engines[PEER]["seconds"]),
                    "finite": row["finite"],
                    **(counted.get(name, {}) if tokens == options.tokens[0] else {}),
                    **held[name].get(tokens, {}),
                    "seconds": seconds,
                }
            )
    return rows


def world_main(_index, world, options, path):
    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    rows = measure(world, options)
    dist.destroy_process_group()
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


def in_a_process(world, options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        mp.spawn(world_main, (world, options, str(path)), nprocs=1)
        return json.loads(path.read_text(encoding="utf-8"))


COLUMNS = {
    "world": "{}",
    "tokens": "{}",
    "engine": "{}",
    "step_s": "{:.4f}",
    "time_of_plain": "{:.3f}",
    "time_of_fsdp2": "{:.3f}",
    "copies_per_unit": "{:.1f}",
    "copy_per_unit_s": "{:.6f}",
    "peak_allocated_bytes": "{:,}",
    "reserved_over_allocated": "{:.3f}",
    "pool_reserved_over_allocated": "{:.3f}",
    "finite": "{}",
}


def printed(rows):
    table = Table(*(name.replace("_", " ") for name in COLUMNS), title=rows[0]["device"])
    for row in rows:
        cells = [(row.get(name), form) for name, form in COLUMNS.items()]
        table.add_row(*("" if value is None else form.format(value) for value, form in cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; none: leave it out"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    options.compiles = options.backend != "none"
    return options


def main(arguments=None):
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_step: torch sees no GPU here; --device cpu tries the logic", file=sys.stderr)
        sys.exit(2)
    rows = []
    for world in options.worlds:
        rows += in_a_process(world, options)
        printed(rows)
        write_report(options.out, rows)  # what there is, should a later world fail
    return rows


if __name__ == "__main__":
    main()
