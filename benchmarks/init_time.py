# SPDX-License-Identifier: Apache-2.0
"""How long does it take to shard a model of 70 or 405 G parameters, and how much host memory?

    python benchmarks/init_time.py [--models 70B 405B] [--worlds 64 1024 16384] [--rounds 3]
                                   [--out FILE.json]

Llama-like models on the meta device, each block a unit; a fake process group stands for the other
ranks. Seconds of processor time, which other programs on the machine do not lengthen, and growth of
resident memory, each in a process of its own that has sharded a small model before; the engines
take turns, a ratio is the median of its rounds'. `FullyShardedDataParallel` gives parameters their
values while it wraps, as FSDP1 does: for it widths and the vocabulary are 1/16, the modules and
parameters as many, values are zeros that take no memory, and the shards are not counted (what the
C library keeps of memory that was needed for a while, is).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.presets import TRANSFORMERS, Transformer
from fullshard.torch import FullyShardedDataParallel, fully_shard
from fullshard.train.torch.models import GPT, Block
from fullshard.wrap import ModuleWrapPolicy

SMALLER = 16
MODELS = {
    "70B": TRANSFORMERS["llama3-70b"],
    # "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.
    "405B": Transformer(126, 16_384, 128, 8, 53_248, 128_256, 8192, rope_theta=500_000.0),
}


def bottom_up(shard):
    def sharded(shape):
        model = on_meta(shape)

        def work():
            for block in model.blocks:
                shard(block)
            return shard(model)

        return work

    return sharded


def wrapper(shape):
    smaller = {key: getattr(shape, key) // SMALLER for key in ("width", "hidden", "vocab")}
    model = on_meta(replace(shape, **smaller))
    policy = ModuleWrapPolicy({Block})
    return lambda: FullyShardedDataParallel(
        model, auto_wrap_policy=policy, param_init_fn=zeros_without_memory
    )


def on_meta(shape):
    with torch.device("meta"):
        return GPT(shape)


def zeros_without_memory(module):
    for own, kind in ((module._parameters, nn.Parameter), (module._buffers, torch.Tensor)):
        for key, tensor in own.items():
            if tensor is not None:
                own[key] = kind(torch.zeros(()).expand(tensor.shape))


PEER = "FSDP2"
ENGINES = {
    PEER: bottom_up(torch_fsdp.fully_shard),
    "fullshard, function": bottom_up(fully_shard),
    "fullshard, wrapper": wrapper,
}


def resident_bytes():
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def shards_bytes(model):
    """Bytes of memory of what this rank has of the parameters."""
    local = [getattr(p, "local", p) for p in model.parameters()]
    storages = {
        s.data_ptr(): s.nbytes() for p in local if not p.is_meta for s in [p.untyped_storage()]
    }
    return sum(storages.values())


def measure_one(model, world, engine):
    """Seconds and bytes of sharding one model, in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    make = ENGINES[engine]
    small = make(TRANSFORMERS["micro"])()
    work = make(MODELS[model])
    before = resident_bytes()
    start = time.process_time()
    sharded = work()
    seconds = time.process_time() - start
    grown = resident_bytes() - before
    parameters = sum(1 for _ in sharded.parameters())
    units = sum(isinstance(m, Block) for m in sharded.modules()) + 1
    found = {
        "seconds": seconds,
        "host_bytes": grown - shards_bytes(sharded),
        "parameters": parameters,
        "units": units,
    }
    del small
    dist.destroy_process_group()
    return found


def measure(options):
    rows = []
    for model in options.models:
        for world in options.worlds:
            found = {engine: [] for engine in ENGINES}
            for _ in range(options.rounds):
                for engine in ENGINES:
                    case = ["--case", model, str(world), engine]
                    done = subprocess.run(
                        [sys.executable, __file__, *case], stdout=subprocess.PIPE, check=True
                    )
                    found[engine].append(json.loads(done.stdout))
            rows += [row(model, world, engine, found) for engine in ENGINES]
    return rows


def row(model, world, engine, found):
    def median_of(key, of=lambda own, peer: own):
        paired = zip(found[engine], found[PEER], strict=True)
        return statistics.median(of(own[key], peer[key]) for own, peer in paired)

    return {
        "model": model,
        "world": world,
        "engine": engine,
        "units": found[engine][0]["units"],
        "parameters": found[engine][0]["parameters"],
        "seconds": median_of("seconds"),
        "seconds_of_fsdp2": median_of("seconds", lambda own, peer: own / peer),
        "host_bytes": median_of("host_bytes"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 16_384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        model, world, engine = options.case
        print(json.dumps(measure_one(model, int(world), engine)))
        return
    rows = measure(options)
    table = Table("model", "ranks", "engine", "units", "seconds", "of FSDP2's", "MB on the host")
    for each in rows:
        table.add_row(
            each["model"],
            str(each["world"]),
            each["engine"],
            str(each["units"]),
            f"{each['seconds']:.2f}",
            f"{each['seconds_of_fsdp2']:.2f}",
            f"{each['host_bytes'] / 1e6:.1f}",
        )
    Console().print(table)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
