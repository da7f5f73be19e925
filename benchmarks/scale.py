# SPDX-License-Identifier: Apache-2.0
"""What grows with the number of ranks, for 70 G parameters, beside FSDP2 and DCP?

    python benchmarks/scale.py [--worlds 64 1024 16384] [--out FILE.json]

A fake process group stands for the other ranks; this process is rank 0, on the host. Construction
is of a Llama-like model on the meta device, each of 80 blocks a unit, and so is what DCP does on
each rank before anything is sent (`DefaultSavePlanner.create_local_plan` of the sharded state
dict), and then on rank 0 alone, of 8 blocks: `create_global_plan` from the plans of all ranks, and
the metadata that it writes. Steps and whole state dicts are of 8 blocks as narrow as can be, since
the others' parts take memory; a unit of them has as many parameters. Calls are of Python functions
of either engine in forward and backward, see `call_counts.py`; collectives are counted where torch
dispatches them. Store operations are those of all ranks' watchdogs together in a second. Manifests
are rank 0's part of a save, cut by rows, see `manifest_size.py`. Seconds are of processor time,
bytes growth of resident memory.
"""

import argparse
import json
import pickle
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from call_counts import OURS, THEIRS, Calls
from init_time import MODELS, bottom_up, resident_bytes
from report import in_own_process, write_report
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.torch import FullyShardedDataParallel, fully_shard
from fullshard.torch.comm.watch.watchdog import period_s_of
from fullshard.train.torch.models import GPT, Block
from fullshard.wrap import ModuleWrapPolicy

SHARD = {"FSDP2": (torch_fsdp.fully_shard, THEIRS), "fullshard": (fully_shard, OURS)}
MODEL = MODELS["70B"]
BLOCKS = 8
NARROW = replace(MODEL, layers=BLOCKS, width=64, heads=8, hidden=64, vocab=64, context=8)
OPERATIONS_A_TURN = 3  # of a watchdog
MANIFEST_SIZE = Path(__file__).with_name("manifest_size.py")


class Collectives(TorchDispatchMode):
    """Counts the collectives that torch dispatches within."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        if "c10d" in space and name != "wait_tensor":
            self.names[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def number(self):
        return self.names.total()


def timed(work):
    """Seconds, collectives and the result of ``work``."""
    with Collectives() as sent:
        start = time.process_time()
        result = work()
        seconds = time.process_time() - start
    return seconds, sent.number, result


def measure(world, engine):
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    shard, root = SHARD[engine]
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    narrow = GPT(NARROW)
    for block in narrow.blocks:
        shard(block)
    shard(narrow)
    tokens = torch.zeros(1, 2, dtype=torch.long)

    def step():
        narrow(tokens).float().sum().backward()

    for _ in range(2):  # the first one learns the order of units
        step()
    _, sent_in_step, _ = timed(step)
    with Calls(root) as calls:
        step()
    whole_s, sent_for_whole, _ = timed(lambda: get_model_state_dict(narrow, options=whole))
    policy = ModuleWrapPolicy({Block})
    wrapped = FullyShardedDataParallel(GPT(NARROW), auto_wrap_policy=policy)
    _, sent_for_wrapper, _ = timed(wrapped.state_dict)
    work = bottom_up(shard)(MODEL)
    before = resident_bytes()
    construction_s, sent_at_start, sharded = timed(work)
    grown = resident_bytes() - before
    state_s, sent_for_state, state = timed(sharded.state_dict)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=False)
    plan_s, _, plan = timed(planner.create_local_plan)
    global_plan = global_plan_of(plan, state, world) if root == THEIRS else {}
    dist.destroy_process_group()
    return {
        "world": world,
        "engine": engine,
        "construction_s": construction_s,
        "construction_bytes": grown,
        "collectives_at_start": sent_at_start,
        "calls_a_unit_and_step": calls.number / (BLOCKS + 1),
        "collectives_a_step": sent_in_step,
        "store_operations_a_second": (
            OPERATIONS_A_TURN * world / period_s_of(world) if root == OURS else 0
        ),
        "state_dict_s": state_s,
        "collectives_for_state_dict": sent_for_state,
        "whole_state_dict_s": whole_s,
        "collectives_for_whole_state_dict": sent_for_whole,
        "dcp_local_plan_s": plan_s,
    } | (
        {"collectives_for_state_dict_of_wrapper": sent_for_wrapper} if root == OURS else global_plan
    )


def global_plan_of(plan, state, world):
    """Measure the global plan that DCP's coordinator makes of ``BLOCKS`` blocks of all ranks."""
    number = re.compile(r"blocks\.(\d+)\.")
    chosen = [
        item
        for item in plan.items
        if (found := number.match(item.index.fqn)) and int(found[1]) < BLOCKS
    ]
    state = {item.index.fqn: state[item.index.fqn] for item in chosen}
    plans = [
        replace(plan, items=[of_rank(item, rank, world) for item in chosen])
        for rank in range(world)
    ]
    plans = [replace(each, items=[item for item in each.items if item]) for each in plans]
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    before = resident_bytes()
    seconds, _, (_, metadata) = timed(lambda: planner.create_global_plan(plans))
    return {
        "dcp_global_plan_s": seconds,
        "dcp_global_plan_bytes": resident_bytes() - before,
        "dcp_metadata_bytes": len(pickle.dumps(metadata)),
    }


def of_rank(item, rank, world):
    """Rank 0's item as that of ``rank``, which has other rows; None if it has none."""
    rows, *others = item.tensor_data.size
    step = -(-rows // world)
    first, last = rank * step, min((rank + 1) * step, rows)
    if first >= last:
        return None
    offsets, sizes = torch.Size([first] + [0] * len(others)), torch.Size([last - first, *others])
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets),
        tensor_data=replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[64, 1024, 16_384])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(int(options.case[0]), options.case[1])))
        return
    rows = []
    for world in options.worlds:
        for engine in SHARD:
            row = in_own_process(__file__, world, engine)
            if engine == "fullshard":
                manifest = in_own_process(MANIFEST_SIZE, world, "row")
                row["manifest_bytes"] = manifest["manifest_bytes"]
                for part in ("plan", "make", "read"):
                    row[f"manifest_{part}_s"] = manifest[f"{part}_seconds"]
            rows.append(row)
    table = Table("", *(f"{row['engine']}, {row['world']:,}" for row in rows))
    for key in rows[-1]:
        if key not in ("world", "engine"):
            table.add_row(key.replace("_", " "), *(shown(row.get(key, "")) for row in rows))
    Console().print(table)
    write_report(options.out, rows)


def shown(value):
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
