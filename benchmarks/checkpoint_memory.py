# SPDX-License-Identifier: Apache-2.0
"""How long does an asynchronous save block, and how much host memory does it hold, by size?

    python benchmarks/checkpoint_memory.py [--mebibytes 128 512 1024] [--bound 0 64] [--rounds 3]

One rank with one model of so many MiB, saved while nothing else runs; a process of its own for each
line. With a bound (MiB, 0: the default of 16 GiB) of host memory below the model's size the call
waits until the rest is copied. Copy: what copying the parameters into memory that is there takes.
Memory: the most that the process was larger during its first save than before it.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fullshard.host_memory import resident_bytes
from fullshard.torch import Background, RunFolder, save_checkpoint

SIDE = 2048  # of a matrix: 16 MiB


def measure(folder, mebibytes, bound, rounds):
    model = torch.nn.Module()
    for number in range(mebibytes // 16):
        model.register_parameter(str(number), torch.nn.Parameter(torch.randn(SIDE, SIDE)))
    background = Background(host_memory_bytes=bound << 20) if bound else Background()
    run = RunFolder(Path(folder, "run"), background=background)
    found = {"copy_s": [], "blocked_s": [], "whole_s": []}
    memory = 0
    for turn in range(rounds + 1):  # the first turn warms up, and tells the memory
        shutil.rmtree(run.path, ignore_errors=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before, _ = resident_bytes()
        begin = time.perf_counter()
        saving = save_checkpoint(run, model, step=1, asynchronous=True)
        blocked = time.perf_counter() - begin
        saving.wait()
        whole = time.perf_counter() - begin
        if turn == 0:
            memory = resident_bytes()[1] - before
            copies = [torch.zeros_like(each) for each in model.parameters()]
            continue
        begin = time.perf_counter()
        for copy, each in zip(copies, model.parameters(), strict=True):
            copy.copy_(each.detach())
        found["copy_s"].append(time.perf_counter() - begin)
        found["blocked_s"].append(blocked)
        found["whole_s"].append(whole)
    medians = {name: round(statistics.median(each), 4) for name, each in found.items()}
    row = {"mebibytes": mebibytes, "bound_mib": bound or 16384, **medians}
    print(json.dumps({**row, "memory_mib": memory >> 20}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[128, 512, 1024])
    parser.add_argument("--bound", type=int, nargs="+", default=[0, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary one)")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for bound in given.bound:
        for mebibytes in given.mebibytes:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                work = (folder, mebibytes, bound, given.rounds)
                process = context.Process(target=measure, args=work)
                process.start()
                process.join()
            if process.exitcode:
                raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
