# SPDX-License-Identifier: Apache-2.0
"""Published measurements of training runs, read as configurations that the planner understands.

Two formats of CSV are known by their columns: the table of MosaicML's llm-foundry (one row is one
run of an MPT model), and a table of runs from papers and repositories (a metric with its value).
A row is turned into a configuration by what it says alone, never by what was measured.
"""

import csv
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.core.strategy import Offload, Precision, ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster, Device
from fullshard.plan.cluster.devices import cluster_of, device_of_driver, named_device
from fullshard.plan.model.config_json import read_model
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.named import named_model
from fullshard.plan.model.operations import Model
from fullshard.plan.run import (
    Adapted,
    AttentionKernel,
    Engine,
    ExpertKernel,
    Loss,
    OptimizerKernels,
    Recompute,
    Run,
)

GIGABIT = 1e9 / 8
MIXED = Precision(compute="bfloat16", reduce="float32")
PURE = Precision(compute="bfloat16", reduce="bfloat16")
# One device without an engine is like ours: nothing is gathered, copied or cast.
_ENGINES = {
    r"fsdp ?1": Engine.FSDP1,
    r"fullshard|plain": Engine.FULLSHARD,
    r"deepspeed|zero|megatron|colossal": Engine.OTHER,
}


@dataclass(frozen=True)
class Row:
    """One measurement: ``tokens`` is tokens/s per device, ``memory_gib`` its peak if it is told.

    That is what torch's allocator reserved, or with ``allocated`` what tensors held.
    """

    source: str
    group: str
    label: str
    model: Model
    run: Run
    cluster: Cluster
    tokens: float
    memory_gib: float | None = None
    allocated: bool = False


def read_rows(
    path: Path, skipped: list[str] | None = None, failed: list[Row] | None = None
) -> list[Row]:
    """All rows of a file that can be predicted; raises `ConfigurationError` for other files.

    Rows that say something unknown are left out, with the reason in ``skipped``; runs that were out
    of memory go to ``failed``, where it is given.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.DictReader(file)
        columns = set(reader.fieldnames or ())
        read = next((each for needed, each in _FORMATS if needed <= columns), None)
        if read is None:
            raise ConfigurationError(
                f"{path} has none of the two known formats; its columns: {sorted(columns)}"
            )
        rows = []
        for number, record in enumerate(reader, 2):
            try:
                died = (record.get("value") or "").strip().upper() == "OOM"
                if died and failed is not None:
                    failed.append(read(path, {**record, "value": "1"}))
                    continue
                rows.append(read(path, record))
            except (FullshardError, ValueError, KeyError, TypeError, AttributeError) as error:
                if skipped is not None:
                    skipped.append(f"{path.name}:{number}: {error}")
    return rows


def _mosaic(path: Path, record: dict[str, str]) -> Row:
    model = named_model("mpt-" + record["model"])
    length = int(record["seq_len"])
    model = Decoder(model.name, replace(model.shape, context=length))
    device = _device(record["gpu"])
    pure = record["mp_mode"] == "PURE"
    run = Run(
        micro_batch=int(record["micro_batch"]),
        sequence=length,
        accumulate=int(record["grad_accum"]),
        strategy=ShardingStrategy[record["sharding_strategy"]],
        param_dtype="float32",
        precision=PURE if pure else MIXED,
        recompute=Recompute.FULL
        if record["activation_checkpointing"].lower() == "true"
        else Recompute.NONE,
        fp8="fp8" in record["precision"],
        attention=AttentionKernel.TRITON,
        optimizer_kernels=OptimizerKernels.FUSED,  # its loop is over one flat parameter a unit
        engine=Engine.FSDP1,
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
    return Row(path.name, record["gpu"], label, model, run, cluster, tokens)


def _published(path: Path, record: dict[str, str]) -> Row:
    texts = {name: text.strip() if text else "" for name, text in record.items() if name}
    texts |= {name: texts.get(name, "").lower() for name in ("precision", "act_ckpt")}
    record = defaultdict(str, texts)
    try:
        value = float(record["value"].replace(",", ""))
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{record['value']!r} is no speed to compare with")
    model = _model(record["model"], path.parent)
    length, batch = (_count(record, name) for name in ("seq", "local_batch"))
    note = record["note"]
    told = f"{record['system']}; {record['source']}; {note}".lower()
    in_float8 = record["precision"].startswith(("fp8", "float8"))
    compiled = re.search(r"\bcompiled?\b(?! loss)|torch\.compile", told) is not None
    run = Run(
        micro_batch=batch,
        sequence=length,
        **_precision(record["precision"]),
        compiled=compiled,
        **_lora(told),
        loss=_loss(told, compiled),
        use_cache="keeps keys and values" in told,
        attention=_attention(told),
        experts=_experts(told),
        kept_router_loss="router loss kept" in told,
        accumulate=int(_number(r"accumulate (\d+)", told, 1)),
        sync_each=re.search(r"\bno[_ -]sync\b", told) is None,
        optimizer_kernels=_optimizer_kernels(told),
        tf32=record["precision"].startswith("tf32"),
        engine=_engine(record["system"]),
        offload=Offload(params=True, optimizer=True) if "; offload" in told else Offload(),
        optimizer="sgd" if "sgd optimizer" in told else "adamw",
        overhead_s=0.0 if re.search("bare loop|trainer loop|nanogpt", told) else None,
        fused_parts="liger kernels" in told,
        fused_norms="fused norms" in told,  # PyTorch had no fused RMSNorm before 2.8
        fp8=in_float8,
        gather_dtype="float8_e4m3fn" if in_float8 else None,
        tensor_parallel=_degree(record["parallelism"], "TP"),
        cut_embedding="torchtitan" in told,
        expandable_segments=re.search("torchtitan|expandable.segments", told) is not None,
        expert_parallel=_degree(record["parallelism"], "EP"),
        **_recompute(record["act_ckpt"], record["system"]),
    )
    cluster = _cluster(record["gpu"], _count(record, "n_gpu"))
    run = _strategy(run, record["parallelism"], cluster)
    tokens = _tokens_per_s(value, record, model, run, cluster)
    label = (
        f"{record['model']} s{length} {record['n_gpu']}x {record['gpu'].split(',')[0]} b{batch} "
        f"{record['act_ckpt']} {record['precision']} {note.split(',')[0][:12]}"
    )
    memory = _gib(record["peak_mem"])
    return Row(
        path.name, record["id"], label, model, run, cluster, tokens, memory, "allocated" in told
    )


def _precision(text: str) -> dict[str, object]:
    """``fp32`` and ``tf32`` throughout, ``pure`` with parameters in 16 bits, ``amp`` by autocast.

    With ``autocast`` it is both that casts, sharding and autocast. With ``reduce in X`` gradients
    travel in X; else precision is mixed. 16 bits are bfloat16 unless it says ``fp16``.
    """
    half = "float16" if re.search(r"\bfp16|\bfloat16|^16|half", text) else "bfloat16"
    told: dict[str, object] = {"param_dtype": half if "pure" in text else "float32"}
    told["autocast"] = half if "amp" in text or "autocast" in text else None
    whole = text.startswith(("fp32", "float32", "tf32")) or "pure" in text or "amp" in text
    reduce = None if whole else "float32"
    if "reduce" in text:
        reduce = "float32" if re.search(r"reduce in (fp|float)32", text) else half
    told["precision"] = Precision(compute=None if whole else half, reduce=reduce)
    return told


def _engine(system: str) -> Engine:
    """FSDP2 unless its name is another's."""
    named = (each for name, each in _ENGINES.items() if re.match(name, system.lower()))
    return next(named, Engine.FSDP2)


def _count(record: dict[str, str], name: str) -> int:
    text = record[name].replace(",", "")
    if not text.isdecimal() or not int(text):
        raise ConfigurationError(f"{name} must be a whole number above 0, got {record[name]!r}")
    return int(text)


def _gib(text: str) -> float | None:
    """Memory in GiB, as torchtitan and others print it, or in MiB; other units tell nothing."""
    told = re.fullmatch(r"(\d+(?:\.\d+)?) *((?:([gm])i?b?)?)(?: *\(.*\))?", text.lower())
    if told is None:
        return None
    return float(told.group(1)) / (1024 if told.group(3) == "m" else 1) or None


def _number(pattern: str, text: str, other: float) -> float:
    found = re.search(pattern, text)
    return float(found.group(1)) if found else other


def _lora(told: str) -> dict[str, object]:
    """Adapters' rank, 16 unless it is told, and beside what: ``LoRA r16 q,k,v,o``, ``q,v``."""
    if "lora" not in told:
        return {}
    on = Adapted.ATTENTION if re.search(r"\bq,(k,)?v,o\b", told) else Adapted.ALL
    return {
        "lora_rank": int(_number(r"lora\D{0,6}(\d+)", told, 16)),
        "lora_on": Adapted.QUERY_VALUE if re.search(r"\bq,v\b(?!,)", told) else on,
        "lora_dtype": "bfloat16" if "adapters in bf16" in told else "float32",
    }


def _loss(told: str, compiled: bool) -> Loss:
    """Such as ``chunked loss`` or ``liger cross-entropy``; torchtitan's does not keep logits.

    It is compiled where the model is, but for the months after pull request 755 (2024-12-19).
    That of nanoGPT is part of forward, which returns 16-bit logits.
    """
    names = "|".join(sorted((each.value for each in Loss), key=len, reverse=True))
    found = re.search(rf"\b({names}|liger)\b[ -]*(?:cross[ -]entropy|loss|linear|ce\b)", told)
    if found:
        if found.group(1) == "liger":
            return Loss.FUSED_LINEAR if "liger loss" in told else Loss.FUSED
        return Loss(found.group(1))
    if "torchtitan" in told:
        return Loss.COMPILED if compiled else Loss.FREED
    if "nanogpt" in told:
        return Loss.NATIVE if compiled else Loss.FREED
    return Loss.PLAIN


def _attention(told: str) -> AttentionKernel:
    """Such as ``FA3``, ``flash_attention_3``, ``FlashAttention-2``, ``cuDNN``."""
    version = re.search(r"\bfa[ _-]?([234])\b|flash[ _-]?att(?:entio)?n[ _-]*v?([234])", told)
    if version:
        return AttentionKernel(f"flash{version.group(1) or version.group(2)}")
    if "attention is not told" in told:
        return AttentionKernel.FLASH
    named = re.search(r"\b(math|eager|masked) attention", told)
    if named:
        return AttentionKernel(named.group(1))
    return AttentionKernel.CUDNN if "cudnn" in told else AttentionKernel.FLASH2


def _optimizer_kernels(told: str) -> OptimizerKernels:
    """Such as ``fused optimizer``, which is torchtitan's, or ``loop optimizer``."""
    found = re.search(r"\b(fused|foreach|loop) optimizer", told)
    usual = "fused" if "torchtitan" in told else "foreach"
    return OptimizerKernels(found.group(1) if found else usual)


def _experts(told: str) -> ExpertKernel | None:
    """Such as ``experts in a loop``, ``fused experts``."""
    found = re.search(r"experts in a (loop)|(fused|grouped|padded|sliced) experts", told)
    return ExpertKernel(found.group(1) or found.group(2)) if found else None


def _model(name: str, folder: Path) -> Model:
    """A model by its name, or by a config.json beside the file of rows."""
    return read_model(str(folder / name)) if name.endswith(".json") else named_model(name)


def _tokens_per_s(value: float, record: dict[str, str], model: Model, run: Run, cluster: Cluster):
    """Tokens/s of one device from any of the metrics in use."""
    metric = record["metric"].lower().replace(" ", "")
    samples = run.micro_batch / run.tensor_parallel
    metric = metric.replace("/second", "/s").replace("/sec", "/s").replace("tokens", "tok")
    if metric in ("tok/s/gpu", "tps", "wps"):
        return value
    if metric == "tok/s":
        return value / cluster.devices
    if metric in ("iteration", "step", "steptime", "s/iter"):
        return samples * run.sequence / (value / 1000 if record["unit"] == "ms" else value)
    flops = model.model_flops(run) / run.sequence  # of a token
    if "tflop" in metric:
        return value * 1e12 / flops
    if metric.startswith("mfu"):
        return value / 100 * cluster.device.peak(run.compute_dtype) / flops
    raise ConfigurationError(f"unknown metric {record['metric']!r}")


def _strategy(run: Run, parallelism: str, cluster: Cluster) -> Run:
    """FSDP unless the row says otherwise; hybrid sharding has a group in each host by default."""
    text = parallelism.upper().replace("-", "").replace("_", "")
    if re.search(r"(PP|CP|EP\d+TP)[2-9]\d*|(PP|CP)1\d+", text):
        raise ConfigurationError(f"parallelism {parallelism!r} is not planned")
    if "HSDP" in text or "HYBRID" in text:
        told = re.search(r"(?<!F)(?<!HS)D?DP(\d+)", text)
        return replace(run, replicas=int(told.group(1)) if told else cluster.hosts)
    if "GRADOP" in text or "ZERO2" in text:
        return replace(run, strategy=ShardingStrategy.SHARD_GRAD_OP)
    if text.startswith("DDP"):
        return replace(run, strategy=ShardingStrategy.NO_SHARD)
    return run


def _degree(parallelism: str, axis: str) -> int:
    found = re.search(rf"\b{axis}(\d+)", parallelism)
    return int(found.group(1)) if found else 1


def _recompute(text: str, system: str) -> dict[str, object]:
    """``N layers ckpt``, ``selective layer`` (each second), ``selective``/``selective op``."""
    layers = re.match(r"(\d+) layers", text)
    if layers:
        count = int(layers.group(1))
        return {"recompute": Recompute.FULL if count else Recompute.NONE, "recompute_blocks": count}
    every = re.match(r"selective (?:layer )?(\d+)", text)
    if every:
        return {"recompute": Recompute.FULL, "recompute_every": int(every.group(1))}
    if text == "selective layer" or (text == "selective" and system == "FSDP1"):
        return {"recompute": Recompute.FULL, "recompute_every": 2}
    if text.startswith("selective"):
        return {"recompute": Recompute.SELECTIVE}
    if text not in ("full", "none", "no", "false", "off", ""):
        raise ConfigurationError(f"unknown recomputation {text!r}: none, selective, full")
    return {"recompute": Recompute.FULL if text == "full" else Recompute.NONE}


def _device(name: str) -> Device:
    """Such as ``a100_80gb``, ``A100-80GB`` or ``H100 96GB HBM2e``, as drivers have them or ours."""
    name = re.sub(r"(?i)(h100.)94gb", r"\g<1>96GB", name)  # as torchtitan calls Meta's own
    return device_of_driver(name) or named_device(name)


def _cluster(gpu: str, devices: int) -> Cluster:
    """Such as ``A100-80GB, 4 a host, 400Gb/s``: per host unless it says per GPU."""
    device = _device(gpu.split(",")[0])
    inside = int(_number(r"(\d+) (?:a|per) host", gpu, device.per_host))
    link = re.search(r"(\d+)\s*Gb/s( per GPU)?", gpu)
    between = None
    if link:
        between = float(link.group(1)) * GIGABIT / (1 if link.group(2) else inside)
    # As evenly as can be, where hosts are not full.
    per_host = math.gcd(devices, inside) if devices > inside else inside
    return cluster_of(device, devices, per_host=per_host, between_bandwidth=between)


_FORMATS = (
    ({"micro_batch", "tokens_per_s_per_gpu", "sharding_strategy"}, _mosaic),
    ({"parallelism", "local_batch", "metric", "value"}, _published),
)
