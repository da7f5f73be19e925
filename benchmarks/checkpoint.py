# SPDX-License-Identifier: Apache-2.0
"""How long do checkpoints take, beside torch.distributed.checkpoint? Same model, disk and ranks.

    python benchmarks/checkpoint.py [--ranks 2] [--rounds 4] [--width 1536] [--nap 0]
                                    [--folder FOLDER]

The model is sharded by PyTorch's own fully_shard, so that both save the same DTensors. Ours has all
checks on; theirs has none to turn on. They take turns, and in each round the other one loads first
(A B B A). On a virtual machine whose host takes free memory back a load waits for fresh pages;
``--nap`` waits after files were dropped, until all are taken back, so that
both pay. Before a cold load the files are dropped from the page cache, before a warm one they are
read once. A resume loads cold files into a new optimizer, which has no state yet. What bounds them
is measured beside them: the same files read in order by a thread of each rank, once more past the
page cache into memory that was used before, the copy of a rank's shards, and their checksums.
Writes JSON to standard output.
"""

import argparse
import importlib.metadata
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

from fullshard.local_ranks import run_local_ranks
from fullshard.torch import load_checkpoint, save_checkpoint

BLOCKS = 8


def build(width):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            )
            for _ in range(BLOCKS)
        )
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer):
    held, state = get_state_dict(model, optimizer)
    return {"model": held, "optimizer": state}


def shard_bytes(model, optimizer):
    values = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    locals_ = [getattr(v, "to_local", lambda v=v: v)().detach() for v in values]
    return sum(each.numel() * each.element_size() for each in locals_), locals_


def _checksum(local):
    data = local.contiguous().view(-1).view(torch.uint8).numpy().data
    for start in range(0, data.nbytes, 2**22):
        xxhash.xxh3_128_hexdigest(data[start : start + 2**22])


def timed(work):
    dist.barrier()
    begin = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - begin, result


def blocked(start):
    """How long ``start`` blocks, and until what it returns is done."""
    dist.barrier()
    begin = time.perf_counter()
    wait = start()
    blocked_s = time.perf_counter() - begin
    wait()
    dist.barrier()
    return blocked_s, time.perf_counter() - begin


def touch_cache(folder, keep, nap_s):
    """Read the folder's files into the page cache; unless ``keep``, drop them then, and wait.

    They are read in both cases: on a virtual machine memory that was just freed is much faster to
    get than other memory, and both libraries should find the same.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                while os.read(descriptor, 2**24):
                    pass
                if not keep:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        if not keep:
            time.sleep(nap_s)
    dist.barrier()


def used_memory(size_bytes):
    """Aligned memory in huge pages, where there are, that was written to."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(size_bytes)
    return memory


def read_alone(folder, buffer, flags=0):
    """Read this rank's files in order, and do nothing with them."""
    for path in sorted(Path(folder).rglob("*.safetensors"))[
        dist.get_rank() :: dist.get_world_size()
    ]:
        descriptor = os.open(path, os.O_RDONLY | flags)
        while os.readv(descriptor, [buffer]) == len(buffer):
            pass
        os.close(descriptor)


def resume_ours(folder, model):
    load_checkpoint(folder, model, torch.optim.AdamW(model.parameters()))


def resume_theirs(folder, model):
    optimizer = torch.optim.AdamW(model.parameters())
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def loads_in_turn(theirs, ours, model, optimizer, state):
    """(name, True if files stay in the page cache, the folder and load of each engine)."""
    loads = {
        "dcp": (theirs, lambda: dcp.load(state, checkpoint_id=theirs)),
        "fullshard": (ours, lambda: load_checkpoint(ours, model, optimizer)),
    }
    resumes = {
        "dcp": (theirs, lambda: resume_theirs(theirs, model)),
        "fullshard": (ours, lambda: resume_ours(ours, model)),
    }
    return ("cold load", False, loads), ("warm load", True, loads), ("resume", False, resumes)


def fresh(folder):
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def measure(folder, rounds, width, nap_s):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    model, optimizer = build(width)
    ours, theirs = f"{folder}/ours", f"{folder}/theirs"
    size_bytes, locals_ = shard_bytes(model, optimizer)
    found = {}

    def note(name, seconds):
        found.setdefault(name, []).append(round(seconds, 4))

    buffers = [torch.empty_like(each).zero_() for each in locals_]
    buffer, wide = bytearray(2**20), used_memory(2**22)
    state = state_of(model, optimizer)
    for turn in range(rounds + 1):  # the first turn warms up, and is not counted
        if turn == 1:
            found.clear()
        fresh(theirs)
        note("dcp save", timed(lambda: dcp.save(state, checkpoint_id=theirs))[0])
        fresh(ours)
        note("fullshard save", timed(lambda: save_checkpoint(ours, model, optimizer, step=1))[0])
        for what, keep, engines in loads_in_turn(theirs, ours, model, optimizer, state):
            for engine, (path, work) in sorted(engines.items(), reverse=turn % 2 == 1):
                touch_cache(path, keep, nap_s)
                note(f"{engine} {what}", timed(work)[0])
        touch_cache(ours, False, nap_s)
        note("reading alone, cold", timed(lambda: read_alone(ours, buffer))[0])
        note("reading alone, warm", timed(lambda: read_alone(ours, buffer))[0])
        touch_cache(ours, False, nap_s)
        note("reading past the cache", timed(lambda: read_alone(ours, wide, os.O_DIRECT))[0])
        note("checksums alone", timed(lambda: [_checksum(each) for each in locals_])[0])
        begin = time.perf_counter()
        for source, target in zip(locals_, buffers, strict=True):
            target.copy_(source)
        note("copy", time.perf_counter() - begin)
        fresh(ours)
        held, whole = blocked(
            lambda: save_checkpoint(ours, model, optimizer, step=1, asynchronous=True).wait
        )
        note("fullshard async blocked", held)
        note("fullshard async", whole)
        for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
            fresh(theirs)
            held, whole = blocked(
                lambda kind=kind: (
                    dcp.async_save(state, checkpoint_id=theirs, async_checkpointer_type=kind).result
                )
            )
            note(f"dcp async {kind.value} blocked", held)
            note(f"dcp async {kind.value}", whole)
    dist.barrier()
    report = {"rank_bytes": size_bytes, "seconds": found} if dist.get_rank() == 0 else None
    dist.destroy_process_group()
    return json.dumps(report) if report else None


def summary(report):
    middle = {name: statistics.median(each) for name, each in report["seconds"].items()}
    ratios = {
        f"{what}: dcp / fullshard": middle[f"dcp {what}"] / middle[f"fullshard {what}"]
        for what in ("save", "cold load", "warm load", "resume")
    }
    beyond = middle["fullshard async blocked"] - middle["copy"]
    ratios["async: blocked beyond the copy / synchronous save"] = beyond / middle["fullshard save"]
    for kind in ("thread", "process"):
        ratios[f"async blocked: dcp {kind} / fullshard"] = (
            middle[f"dcp async {kind} blocked"] / middle["fullshard async blocked"]
        )
    return {name: round(value, 3) for name, value in ratios.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, nargs="+", default=[1536])
    parser.add_argument("--nap", type=float, default=0.0, help="seconds between drop and load")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary one)")
    given = parser.parse_args()
    reports = []
    for width in given.width:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            text = run_local_ranks(measure, (folder, given.rounds, width, given.nap), given.ranks)
        report = json.loads(text)
        reports.append({"width": width, **report, "ratios": summary(report)})
    versions = {name: importlib.metadata.version(name) for name in ("torch", "xxhash")}
    found = {"ranks": given.ranks, "nap_s": given.nap, "versions": versions, "runs": reports}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
