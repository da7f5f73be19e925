# SPDX-License-Identifier: Apache-2.0
"""What does a training step take on one GPU, in time and memory, as trainers write it?

    python benchmarks/one_gpu_rows.py [--seconds 400] [--out FILE.json] [--csv FILE.csv]

Each row is one way to train a model of transformers (`ways_to_train.py`): lengths, precision,
attention, checkpoints, loss, optimizer, engine. Time is that of the device over some steps without
a wait in between; the split into forward, backward and optimizer, and the host's time to issue
each, are of a further step that is waited for. Memory is the peak of those steps, allocated and
reserved. Rows that are marked are recorded by torch's profiler as well: seconds of the device by
kernel.

Kernels alone (`one_gpu_kernels.py`) come between. Rows are written as they come, the most telling
first; no row begins after ``--seconds``. `--rows unexplained` are those of later questions: what
adapters in float32 keep, what callers keep of logits, other kernels for norms and gates, experts
without recomputation, an optimizer on the host. One that is out of memory, or fails, becomes a row
that says so. The CSV has the columns of `benchmarks/data`. `--device cpu` tries each kind of row at
a tiny size.
"""

import argparse
import csv
import gc
import json
import statistics
import sys
import time
import traceback
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import one_gpu_kernels
import torch
import torch.distributed as dist
from ways_to_train import Case, Training, attention_of

GIB = 2**30
WARM_UP, TIMED = 2, 4

LLAMA8, PHI, PHI_WINDOW = "llama-3.1-8b-8-layers", "phi3-mini", "phi3-mini-window"
LLAMA, QWEN, MOE = "llama-3.2-1b", "qwen3-0.6b", "qwen3-30b-a3b-4-layers"
SMOL = "smollm3-18-layers"
WHOLE = "llama-3.1-8b"
_FULL = Case(LLAMA8, 8192, 2, recompute="full")
_SMALL = Case(LLAMA, 2048, 4)
FIRST = (
    replace(_FULL, profiled=True),
    Case(WHOLE, 8192, 2, recompute="full", optimizer="sgd"),
    Case(PHI, 8192, 2, recompute="full", profiled=True),
    replace(_SMALL, precision="amp", loop="trainer", optimizer="foreach", profiled=True),
    Case(QWEN, 2048, 1, profiled=True),
    replace(_FULL, attention="eager", sequence=2048, batch=4, profiled=True),
    replace(_FULL, mask="padded"),
    Case(PHI_WINDOW, 8192, 1, recompute="full"),
    replace(_FULL, optimizer="loop"),
    replace(_FULL, optimizer="foreach"),
    replace(_FULL, mask="ones", loop="trainer"),
    replace(_SMALL, engine="fullshard", precision="mixed"),
    replace(_SMALL, engine="fsdp2", precision="mixed"),
    replace(_SMALL, engine="fullshard offload", precision="mixed"),
    replace(_SMALL, engine="fsdp2", precision="mixed", optimizer="loop"),
    replace(_SMALL, engine="fullshard", precision="mixed", optimizer="loop"),
    replace(_SMALL, precision="amp"),
    _SMALL,
    Case(MOE, 4096, 2, recompute="full", profiled=True),
    Case(MOE, 4096, 2, recompute="full", experts="eager"),
)
SECOND = (
    Case(WHOLE, 8192, 1, recompute="full", optimizer="sgd"),
    Case(LLAMA, 512, 1),
    Case(LLAMA, 512, 8),
    Case(LLAMA, 2048, 1),
    Case(LLAMA, 8192, 1),
    Case(LLAMA, 8192, 1, recompute="full"),
    Case(LLAMA, 8192, 1, recompute="full, reentrant"),
    Case(LLAMA, 16384, 1, recompute="full"),
    Case(LLAMA, 32768, 1, recompute="full", loss="chunked"),
    Case(LLAMA, 32768, 1, recompute="full"),
    replace(_SMALL, loss="native"),
    replace(_SMALL, loss="chunked"),
    replace(_SMALL, cache=True),
    replace(_SMALL, attention="sdpa cudnn"),
    replace(_SMALL, attention="sdpa math", batch=1),
    replace(_SMALL, attention="eager", batch=1),
    replace(_SMALL, mask="padded"),
    replace(_SMALL, lora=16),
    replace(_SMALL, lora=16, recompute="full"),
    replace(_SMALL, accumulate=4),
    replace(_SMALL, precision="fp32", batch=2),
    Case(QWEN, 2048, 8, precision="amp", recompute="full"),
    Case(QWEN, 2048, 8),
    Case(QWEN, 512, 4, precision="amp", loop="trainer", optimizer="loop"),
    Case(QWEN, 8192, 2, recompute="full"),
    Case(QWEN, 16384, 1, recompute="full"),
    Case(WHOLE, 4096, 2, recompute="full", lora=16),
    replace(_FULL, recompute="none", sequence=2048),
    replace(_FULL, precision="amp", sequence=4096),
    replace(_FULL, engine="fullshard", precision="mixed", sequence=4096),
    replace(_FULL, engine="fsdp2", precision="mixed", sequence=4096),
    replace(_SMALL, engine="fsdp2 offload", precision="mixed"),
    Case(QWEN, 2048, 4, engine="fullshard", precision="mixed"),
    Case(QWEN, 2048, 4, engine="fsdp2", precision="mixed"),
    Case(PHI, 4096, 1, recompute="full", loop="trainer"),
    Case(PHI, 2048, 1),
    replace(_SMALL, compiled="blocks"),
    replace(_SMALL, compiled="model"),
    replace(_FULL, compiled="blocks"),
    Case(QWEN, 2048, 8, compiled="model", precision="amp"),
)
_SP = Case(WHOLE, 1024, 4, lora=16, adapters="all wide")  # 8B, whole, no recomputation
_LORA = replace(_SMALL, lora=16, adapters="all wide")
UNEXPLAINED = (
    _SP,
    _LORA,
    Case(SMOL, 8192, 1),
    Case(QWEN, 4096, 16, recompute="full", liger=True),
    replace(_SMALL, loss="kept"),
    replace(_SMALL, precision="amp", loss="kept wide", loop="trainer"),
    Case(MOE, 4096, 1),
    replace(_LORA, precision="pure amp"),
    replace(_LORA, adapters="all wide 0.05"),
    replace(_LORA, adapters="qv wide"),
    replace(_LORA, adapters="all wide 0.05", recompute="full"),
    Case(WHOLE, 4096, 2, recompute="full", lora=16, adapters="all wide"),
    Case(SMOL, 8192, 1, mask="ones", loss="kept", loop="trainer"),
    Case(SMOL, 8192, 1, engine="fsdp2"),
    Case(QWEN, 2048, 8, liger=True),
    replace(_SMALL, loss="policy"),
    replace(_LORA, lora=64, adapters="all same"),
    replace(_LORA, adapters="qv same"),
    Case(LLAMA8, 2048, 2, engine="fullshard offload", precision="mixed"),
    Case(LLAMA8, 2048, 2, engine="fsdp2 offload", precision="mixed"),
    Case(LLAMA8, 2048, 2, engine="fsdp2 offload", optimizer="foreach"),
    Case(MOE, 4096, 2, engine="fsdp2", recompute="full"),
    replace(_SP, adapters="all wide 0.05", recompute="full"),
    replace(_SMALL, liger=True),  # replaces functions of the model's module, so it comes last
)


# ---- time ---------------------------------------------------------------------------------------


class Marks:
    """The device's and the host's clock at places of one step."""

    def __init__(self, device):
        self.device, self.names, self.host, self.events = device, [], [], []
        self.held_gib = {}

    def __call__(self, name):
        self.names.append(name)
        self.host.append(time.perf_counter())
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
            self.held_gib[name] = torch.cuda.memory_allocated() / GIB

    def seconds(self):
        """Return those of the device and of the host's issuing, by part; equal names are added."""
        device, host = {}, {}
        for place in range(1, len(self.names)):
            name = self.names[place]
            issued = self.host[place] - self.host[place - 1]
            host[name] = host.get(name, 0.0) + issued
            if self.events:
                issued = self.events[place - 1].elapsed_time(self.events[place]) / 1e3
            device[name] = device.get(name, 0.0) + issued
        return device, host


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(case, device):
    """The figures of a row."""
    began = time.perf_counter()
    with attention_of(case):
        training = Training(case, device)
        settle(device)
        ready = time.perf_counter()
        for _ in range(WARM_UP):
            last = time.perf_counter()
            training.step()
            settle(device)
        warm = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = times(training, device, 2 if warm - last > 1.5 else TIMED)
        found |= memory(device)
        found["parameters"] = sum(each.numel() for each in training.model.parameters())
        found["tokens_per_s"] = training.ids.numel() * case.accumulate / found["step_s"]
        found["built_s"], found["warm_s"] = ready - began, warm - ready
        if case.profiled:
            found["kernels"] = kernels_of(training, device)
    return found


def times(training, device, steps):
    mark = Marks(device)
    started = time.perf_counter()
    mark("begin")
    for _ in range(steps):
        training.step()
        mark("step")
    issued = time.perf_counter()
    settle(device)
    stopped = time.perf_counter()
    each = [first.elapsed_time(second) / 1e3 for first, second in pairwise(mark.events)] or [
        second - first for first, second in pairwise(mark.host)
    ]
    parts = Marks(device)
    parts("begin")
    training.step(parts)
    settle(device)
    device_s, host_s = parts.seconds()
    return {
        "step_s": (stopped - started) / steps,
        "each_s": each,
        "median_s": statistics.median(each),
        "issued_s": (issued - started) / steps,
        "device_s": device_s,
        "host_s": host_s,
        "held_gib": parts.held_gib,
    }


def memory(device):
    if device.type != "cuda":
        return {"allocated_gib": 0.0, "reserved_gib": 0.0, "resting_gib": 0.0}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "resting_gib": torch.cuda.memory_allocated() / GIB,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def kernels_of(training, device):
    """Seconds and counts of a step's kernels by name; the longest 60 names."""
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CUDA if device.type == "cuda" else activity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        training.step()
        settle(device)
    spent = {}
    for event in profile.events():
        if device.type == "cuda" and event.device_type.name != "CUDA":
            continue
        seconds, count = spent.get(event.name, (0.0, 0))
        spent[event.name] = seconds + event.time_range.elapsed_us() / 1e6, count + 1
    rows = sorted(spent.items(), key=lambda each: -each[1][0])
    rest = rows[60:]
    listed = [[name[:300], seconds, count] for name, (seconds, count) in rows[:60]]
    others = ["others", sum(each[1][0] for each in rest), sum(each[1][1] for each in rest)]
    return [*listed, others]


# ---- all rows -----------------------------------------------------------------------------------


def emptied(device):
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def tried(case, device):
    """A row, whatever happens."""
    row = {"case": asdict(case)}
    try:
        row |= measured(case, device)
    except torch.OutOfMemoryError as error:
        row["failed"] = "out of memory"
        row["told"] = str(error)[:300]
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"[:600]
        row["told"] = traceback.format_exc()[-1500:]
    emptied(device)
    return row


def told(row):
    case = row["case"]
    name = " ".join(str(each) for each in case.values() if each not in ("", "none", 0, 1, False))
    if "failed" in row:
        return f"{name[:100]:100} {row['failed'][:120]}"
    split = " ".join(f"{part} {seconds * 1e3:.0f}" for part, seconds in row["device_s"].items())
    host = sum(row["host_s"].values()) * 1e3
    return (
        f"{name[:100]:100} {row['tokens_per_s']:>8,.0f} tok/s {row['step_s'] * 1e3:>7.0f} ms "
        f"({split}; host {host:.0f}) {row['allocated_gib']:.1f} / {row['reserved_gib']:.1f} GiB"
    )


def is_planned(case):
    """False if a planner cannot be told: a second forward, or what adapters drop."""
    return case["loss"] != "policy" and len(case["adapters"].split()) == 2


def as_published(row, gpu):
    """The row in the columns of ``benchmarks/data``."""
    case = Case(**row["case"])
    failed = "failed" in row
    value = ("OOM" if row["failed"] == "out of memory" else "failed") if failed else ""
    precision = {"pure": "bf16-pure", "amp": "bf16-amp", "mixed": "bf16", "fp32": "fp32"}
    precision["pure amp"] = "bf16-pure amp"
    engine = case.engine.split()[0]
    return {
        "id": "OG",
        "source": "benchmarks/one_gpu_rows.py",
        "grade": "A",
        "system": "FSDP2" if engine == "fsdp2" else engine,
        "model": f"models/{case.model}.json",
        "gpu": gpu,
        "n_gpu": 1,
        "parallelism": "DDP" if engine == "plain" else "FSDP",
        "seq": case.sequence,
        "local_batch": case.batch,
        "precision": precision[case.precision],
        "act_ckpt": case.recompute.split(",")[0],
        "metric": "tok/s/GPU",
        "value": value or round(row["tokens_per_s"], 1),
        "unit": "tps",
        "peak_mem": "" if failed else round(row["reserved_gib"], 2),
        "note": "; ".join(notes(case)),
    }


def notes(case):
    """Yield what else a row says, in the words that `plan_rows` reads."""
    yield {"": "eager", "model": "compiled"}.get(case.compiled, f"compiled {case.compiled}")
    hf = "compiled loss" if case.compiled == "model" else "freed loss"
    named = {"hf": hf, "kept wide": "kept loss"}
    yield (
        "fused-linear loss; liger kernels"
        if case.liger
        else named.get(case.loss, f"{case.loss} loss")
    )
    # Of the kernels for grouped heads only PyTorch's own computes in float32.
    usual = "math" if case.precision == "fp32" else "cuDNN"
    kernel = case.attention.replace("sdpa", usual if case.attention == "sdpa" else "").strip()
    masked = case.mask == "padded" or case.model == PHI_WINDOW
    yield f"{'masked' if masked else kernel} attention"
    yield f"{case.optimizer} optimizer"
    yield f"{case.loop} loop"
    if case.lora:
        targets, width = case.adapters.split()
        where = {"all": "", "qv": " q,v"}[targets]
        yield f"LoRA {case.lora}{where}; adapters {'in float32' if width == 'wide' else 'in bf16'}"
    if case.accumulate > 1:
        yield f"accumulate {case.accumulate}"
    if case.cache:
        yield "keeps keys and values"
    if "offload" in case.engine:
        yield "offload"
    if case.model == MOE:
        yield "sliced experts" if case.experts == "eager" else "grouped experts"
    yield "peak reserved"


class Written:
    """Rows on the screen and in files, as they come."""

    def __init__(self, given, about):
        self.given, self.about = given, about
        self.rows, self.kernels = [], []

    def row(self, row):
        self.rows.append(row)
        print(told(row), flush=True)
        self._write()

    def kernel(self, row):
        self.kernels.append(row)
        print(" ".join(f"{key} {value}" for key, value in row.items()), flush=True)

    def flush(self):
        self._write()

    def _write(self):
        whole = {**self.about, "rows": self.rows, "kernels": self.kernels}
        if self.given.out is not None:
            self.given.out.write_text(json.dumps(whole, indent=1) + "\n", "utf-8")
        rows = [each for each in self.rows if is_planned(each["case"])]
        if self.given.csv is not None and rows:
            lines = [as_published(row, self.about["gpu"]) for row in rows]
            with self.given.csv.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)


def main(argv=None):
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=400, help="begin no row later than this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--only", default="", help="rows that have this in their case")
    parser.add_argument("--rows", choices=("usual", "unexplained"), default="usual")
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here; --device cpu tries the logic", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    written = Written(given, {"gpu": gpu, "torch": torch.__version__})

    def late():
        return time.perf_counter() - began > given.seconds

    def rows(cases):
        for case in cases:
            if given.only in str(case) and not late():
                written.row(tried(case, device))
                print(f"  at {time.perf_counter() - began:.0f} s", flush=True)

    usual = given.rows == "usual"
    rows(FIRST if usual else UNEXPLAINED)
    kinds = one_gpu_kernels.KINDS if usual else (one_gpu_kernels.host_optimizers,)
    for kernel in one_gpu_kernels.all_kernels(device, kinds):
        if given.only or late():
            break
        written.kernel(kernel)
    written.flush()
    emptied(device)
    rows(SECOND if usual else ())
    written.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
