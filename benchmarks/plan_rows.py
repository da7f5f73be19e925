# SPDX-License-Identifier: Apache-2.0
"""Published measurements of training runs, read as configurations that the planner understands.

Two formats of CSV are known by their columns: the table of MosaicML's llm-foundry (one row is one
run of an MPT model), and a table of runs from papers and repositories (a metric with its value).
A row is turned into a configuration by what it says alone, never by what was measured.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Precision, ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.read import cluster_of, named_device
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.named import named_model
from fullshard.plan.run import Attention, Loss, Recompute, Run

GIGABIT = 1e9 / 8
MIXED = Precision(compute="bfloat16", reduce="float32")
PURE = Precision(compute="bfloat16", reduce="bfloat16")


@dataclass(frozen=True)
class Row:
    """One measurement: ``tokens`` is tokens/s per device, ``memory_gib`` its peak if it is told."""

    source: str
    group: str
    label: str
    model: Decoder
    run: Run
    cluster: Cluster
    tokens: float
    memory_gib: float | None = None


def read_rows(path: Path) -> list[Row]:
    """All rows of a file that are measurements; raises `ConfigurationError` for other files."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        if {"micro_batch", "tokens_per_s_per_gpu", "sharding_strategy"} <= columns:
            return [_mosaic(path.name, record) for record in reader]
        if {"parallelism", "local_batch", "metric", "value"} <= columns:
            return [row for record in reader if (row := _published(path.name, record)) is not None]
    raise ConfigurationError(f"{path} has none of the two known formats; its columns: {columns}")


def _mosaic(source: str, record: dict[str, str]) -> Row:
    model = named_model("mpt-" + record["model"])
    length = int(record["seq_len"])
    model = Decoder(model.name, replace(model.shape, context=length))
    device = named_device(
        {"h100_80gb": "h100", "a100_80gb": "a100-80", "a100_40gb": "a100-40"}[record["gpu"]]
    )
    pure = record["mp_mode"] == "PURE"
    run = Run(
        micro_batch=int(record["micro_batch"]),
        sequence=length,
        accumulate=int(record["grad_accum"]),
        strategy=ShardingStrategy[record["sharding_strategy"]],
        param_dtype="float32",
        precision=PURE if pure else MIXED,
        recompute=Recompute.FULL
        if record["activation_checkpointing"] == "True"
        else Recompute.NONE,
        fp8="fp8" in record["precision"],
        attention=Attention.TRITON,
        extra_copies=2,
        loss=Loss.FUSED,
        recompute_stops=not pure,  # PURE rows were made with PyTorch 1.13, which went to the end
    )
    label = (
        f"{record['model']} s{length} {record['gpus']}x mb{run.micro_batch} "
        f"acc{run.accumulate}{' AC' if run.recompute is Recompute.FULL else ''} "
        f"{record['precision']}"
    )
    between = 200 * GIGABIT if device.key.startswith("a100") else None  # 1,600 Gbit/s a host
    cluster = cluster_of(device, int(record["gpus"]), between_bandwidth=between)
    tokens = float(record["tokens_per_s_per_gpu"])
    return Row(source, record["gpu"], label, model, run, cluster, tokens)


def _published(source: str, record: dict[str, str]) -> Row | None:
    try:
        value = float(record["value"])
    except ValueError:
        return None  # out of memory: there is no speed to compare with
    model = named_model(_model_name(record["model"]))
    length, batch = int(record["seq"]), int(record["local_batch"])
    note = record["note"]
    in_float8 = record["precision"].startswith(("fp8", "float8"))
    run = Run(
        micro_batch=batch,
        sequence=length,
        param_dtype="float32",
        precision=MIXED,
        compiled="compile" in note,
        extra_copies=2,
        fused_norms=False,  # PyTorch had no fused RMSNorm before 2.8
        fp8=in_float8,
        gather_dtype="float8_e4m3fn" if in_float8 else None,
        tensor_parallel=_degree(record["parallelism"], "TP"),
        **_recompute(record["act_ckpt"], record["system"]),
    )
    cluster = _cluster(record["gpu"], int(record["n_gpu"]))
    tokens = value if record["metric"] == "tok/s/GPU" else batch * length / value
    label = (
        f"{record['model']} s{length} {record['n_gpu']}x {record['gpu'].split(',')[0]} b{batch} "
        f"{record['act_ckpt']} {record['precision']} {note.split(',')[0][:12]}"
    )
    memory = float(record["peak_mem"]) if record["peak_mem"] else None
    return Row(source, record["id"], label, model, run, cluster, tokens, memory)


def _model_name(name: str) -> str:
    return name.lower().replace("llama3.1", "llama3").replace(" ", "-")


def _degree(parallelism: str, axis: str) -> int:
    found = re.search(rf"\b{axis}(\d+)", parallelism)
    return int(found.group(1)) if found else 1


def _recompute(text: str, system: str) -> dict[str, object]:
    """``N layers ckpt``, ``selective layer`` (each second), ``selective``/``selective op``."""
    layers = re.match(r"(\d+) layers", text)
    if layers:
        count = int(layers.group(1))
        return {"recompute": Recompute.FULL if count else Recompute.NONE, "recompute_blocks": count}
    if text == "selective layer" or (text == "selective" and system == "FSDP1"):
        return {"recompute": Recompute.FULL, "recompute_every": 2}
    if text.startswith("selective"):
        return {"recompute": Recompute.SELECTIVE}
    return {"recompute": Recompute.FULL if text == "full" else Recompute.NONE}


def _cluster(gpu: str, devices: int) -> Cluster:
    """Such as ``A100-80GB, 400Gb/s``: per host unless it says per GPU."""
    name = gpu.split(",")[0]
    key = "h100-96" if re.search(r"H100.*(94|96)", name) else name.split()[0].lower()
    device = named_device(key)
    link = re.search(r"(\d+)\s*Gb/s( per GPU)?", gpu)
    between = None
    if link:
        between = float(link.group(1)) * GIGABIT / (1 if link.group(2) else device.per_host)
    return cluster_of(device, devices, between_bandwidth=between)
