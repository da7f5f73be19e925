# SPDX-License-Identifier: Apache-2.0
"""Measure how much longer a step takes that is recorded.

    python benchmarks/recording.py [--units 64] [--width 384] [--batch 128] [--rounds 20]
        [--out FILE.json]

One rank of a fake group of 8, whose collectives do nothing (see `wire`), so nothing hides the cost.
Processor time of this thread. Rounds with and without recording take turns (A B C A B C ...), and
each counts by its fastest step, which other programs on the machine lengthen least; a ratio is that
of the fastest of all rounds. "detailed" records every step op by op, "usual" none of them: of 50
steps, 49 are like that, and the file is written once a step in both. The cost is that of the host
for each op, so it is measured on layers too small to count themselves, and compared with a step of
layers of the width and batch that are asked for.
"""

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from wire import Silence

from fullshard.report import record_path, recording
from fullshard.torch import fully_shard

STEPS = 4
SMALL = 16, 2  # width, batch


def build(units, width):
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
            for _ in range(units)
        )
    )
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def steps_s(model, optimizer, inputs, count=STEPS):
    """Seconds of processor time of the fastest step."""
    times = []
    for _ in range(count):
        begin = time.process_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - begin)
    return min(times)


def prepared(units, width, batch):
    model = build(units, width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    inputs = torch.ones(batch, width)
    steps_s(model, optimizer, inputs)
    return model, optimizer, inputs


def measure(options, folder):
    model, optimizer, inputs = prepared(options.units, *SMALL)
    found = {"without": [], "usual": [], "detailed": []}
    for _ in range(options.rounds):
        for name, times in found.items():
            gc.collect()
            if name == "without":
                times.append(steps_s(model, optimizer, inputs))
                continue
            every = 1 if name == "detailed" else 10**9
            with recording(Path(folder, name), model, optimizer, detailed_every=every) as run:
                run.goes_on_from(3)  # behind the first ones, which are all detailed
                times.append(steps_s(model, optimizer, inputs))
    rows = []
    for name, times in found.items():
        file = record_path(Path(folder, name), 0)
        count = options.rounds * STEPS
        rows.append(
            {
                "steps": name,
                "ms": 1e3 * min(times),
                "beyond_us": 1e6 * (min(times) - min(found["without"])),
                "ratio": min(times) / min(found["without"]),
                "median_ms": 1e3 * statistics.median(times),
                "bytes_a_step": file.stat().st_size / count if file.exists() else 0,
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    with Silence().patched(), tempfile.TemporaryDirectory() as folder:
        rows = measure(options, folder)
        large = prepared(options.units, options.width, options.batch)
        step_us = 1e6 * min(steps_s(*large) for _ in range(options.rounds // 4 + 1))
    dist.destroy_process_group()
    mean_us = (49 * rows[1]["beyond_us"] + rows[2]["beyond_us"]) / 50
    table = Table(title=f"{options.units} units of width {SMALL[0]}, batch {SMALL[1]}")
    for head in rows[0]:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    step = f"one of width {options.width} and batch {options.batch}, {step_us / 1e3:.0f} ms"
    share = f"{mean_us:.0f} us a step, {mean_us / step_us:.2%} of {step}"
    print(f"of 50 steps, 49 usual and 1 detailed: {share}")
    write_report(options.out, [*rows, {"steps": "mean of 50", "us": mean_us, "of_us": step_us}])


if __name__ == "__main__":
    main()
