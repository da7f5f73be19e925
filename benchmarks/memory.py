# SPDX-License-Identifier: Apache-2.0
"""What does a step hold beyond what rests, in units, and what rests, beside FSDP1 and FSDP2?

    python benchmarks/memory.py [--world 64] [--width 1024] [--units 8] [--out FILE.json]

A fake process group stands for the other ranks: its collectives exchange nothing and complete at
once. For fullshard there is also a row in which none completes before it is waited for, as over a
slow link. (Reduces of Gloo hold (N-1)/N of a unit besides while they are under way.) Blocks of a
transformer, each a unit, and one token: what is held are parameters and gradients, hardly any
activations. The configuration is that of `default_configuration`.

On the CPU every byte that the allocator gave or took back from the model's construction on is
counted, as the profiler recorded it. At rest: after an optimizer's step and the backward after it,
which is parameters, gradients and optimizer state. Transient: the peak of that step beyond it.
It includes gradients as autograd makes them.
On a GPU (``--device cuda``) the same from the caching allocator's statistics, and what it has
reserved over what was allocated, at their peaks over a further step with its optimizer's.
"""

import argparse
import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from default_configuration import adamw, fsdp1, fsdp2, fullshard
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_step import BLOCK

from fullshard.prove.memory import BACKWARD, OVER, Paced, held_bytes, take_marked_step
from fullshard.torch.comm.process_group import ProcessGroupComm

WHOLE = "a further step and its optimizer's"


def paced_fullshard(at_once):
    def shard(model, block):
        group = ProcessGroupComm(dist.group.WORLD)
        return fullshard(model, block, mesh=Paced(group, at_once))

    return shard


ENGINES = {
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "fullshard": paced_fullshard(at_once=True),
    "fullshard, a reduce in flight": paced_fullshard(at_once=False),
}


def build(options):
    with torch.device(options.device):
        return nn.Sequential(
            *(
                BLOCK(options.width, 8, 4 * options.width, dropout=0.0, batch_first=True)
                for _ in range(options.units)
            )
        )


def run(shard, options, mark):
    """Some steps, and one between marks that ends with its backward; then mark a whole one."""
    model = shard(build(options), BLOCK)
    optimizer = adamw(model.parameters())
    inputs = torch.ones(1, 1, options.width, device=options.device)
    take_marked_step(model, optimizer, inputs, mark)
    optimizer.step()
    optimizer.zero_grad()
    model(inputs).sum().backward()
    mark(WHOLE)


def on_cpu(shard, options):
    """Bytes held at rest, and at the peaks of forward and backward, by the profiler's record."""
    return held_bytes(lambda mark: run(shard, options, mark))


def on_gpu(shard, options):
    """The same by the caching allocator's statistics, and reserved over allocated."""
    peaks = {}
    base = torch.cuda.memory_allocated()

    def mark(name):
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - base
        if name == OVER:
            peaks["rest"] = torch.cuda.memory_allocated() - base
        if name == WHOLE:
            peaks["reserved"] = torch.cuda.max_memory_reserved()
            peaks["allocated"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.empty_cache()
    run(shard, options, mark)
    return {
        "rest": peaks["rest"],
        "forward": peaks[BACKWARD],  # what had been the peak when backward began
        "backward": peaks[OVER],
        "reserved_over_allocated": peaks["reserved"] / peaks["allocated"],
    }


def measure(options):
    """A row for each engine; transient bytes in bytes of a unit's full parameters."""
    gpu = options.device == "cuda"
    if gpu:  # libraries take their workspaces once, and no engine shall be charged with them
        build(options)(torch.ones(1, 1, options.width, device="cuda")).sum().backward()
    unit_bytes = 4 * sum(p.numel() for p in build(options)[0].parameters())
    shards_bytes = 4 * options.units * unit_bytes // options.world
    rows = {}
    for name, shard in ENGINES.items():
        gc.collect()
        found = (on_gpu if gpu else on_cpu)(shard, options)
        rows[name] = {
            "world": options.world,
            "device": torch.cuda.get_device_name() if gpu else "cpu",
            "unit_bytes": unit_bytes,
            "forward_units": (found["forward"] - found["rest"]) / unit_bytes,
            "backward_units": (found["backward"] - found["rest"]) / unit_bytes,
            "rest_bytes": found["rest"],
            "rest_of_4p_over_n": found["rest"] / shards_bytes,
            "reserved_over_allocated": found.get("reserved_over_allocated"),
        }
    return rows


def printed(rows):
    columns = ["forward", "backward", "MB at rest", "of 4P/N", "reserved"]
    table = Table("engine", *columns)
    for name, row in rows.items():
        reserved = row["reserved_over_allocated"]
        table.add_row(
            name,
            f"{row['forward_units']:.2f}",
            f"{row['backward_units']:.2f}",
            f"{row['rest_bytes'] / 1e6:.2f}",
            f"{row['rest_of_4p_over_n']:.3f}",
            "" if reserved is None else f"{reserved:.3f}",
        )
    first = next(iter(rows.values()))
    unit = f"units of {first['unit_bytes'] / 1e6:.1f} MB beyond rest at the peak"
    table.title = f"{first['world']} ranks, {first['device']}: {unit}"
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("memory: no GPU here; --device cpu counts by the profiler", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of FSDP1, about itself
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world)
    rows = measure(options)
    dist.destroy_process_group()
    printed(rows)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
