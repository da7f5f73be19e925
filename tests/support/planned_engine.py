# SPDX-License-Identifier: Apache-2.0
"""Random configurations, run by the engine and planned, for tests that compare both to the byte."""

import random
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from support.models import CASES, loss_of, make, make_batches
from support.planned_trace import planned_trace
from support.random_models import WIDTH, build
from torch import nn

from fullshard.core.strategy import Offload, Precision, Prefetch, ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster, Device, Link
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.memory import resting_memory
from fullshard.plan.run import Run
from fullshard.plan.step.script import write_script
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    resting_bytes,
    tracing,
)
from fullshard.torch.measuring import record_step
from fullshard.torch.step.tracker import ensure_tracker

LINK = Link(1e9, 1e-6)
DEVICE = Device(
    key="test",
    title="test device",
    flops={"float32": 1e12},
    sustained=1.0,
    attention=1.0,
    memory_bytes=2**34,
    bandwidth=1e11,
    power_w=100.0,
    host_link=1e10,
    per_host=8,
    inside=LINK,
    between=LINK,
    context_bytes=0,
    assumed=(),
    origin="none",
    cpu=True,
)
STRATEGIES = list(ShardingStrategy)
PRECISIONS = [
    Precision(),
    Precision(),
    Precision(compute="bfloat16", cast_root_inputs=True),
    Precision(compute="bfloat16", reduce="float32", cast_root_inputs=True),
    Precision(compute="bfloat16", keep_low_grads=True, cast_root_inputs=True),
    Precision(reduce="bfloat16"),
]
PREFETCHES = [Prefetch(), Prefetch(0, 0), Prefetch(2, 1), Prefetch(1, 2, 2), Prefetch(1, 1, 1, 900)]
OFFLOADS = [Offload(), Offload(), Offload(), Offload(params=True), Offload(optimizer=True)]


@dataclass(frozen=True)
class Configuration:
    """One case of `support.models`, how it is cut into units, and how it runs."""

    case: str
    units: tuple[str, ...]
    frozen: tuple[str, ...]
    world: int
    run: Run

    @classmethod
    def random(cls, seed: int, worlds: list[int]) -> "Configuration":
        """A configuration of its own for each seed."""
        choose = random.Random(seed)
        case = choose.choice(sorted(CASES))
        model = make(case)
        paths = [
            path
            for path, module in model.named_modules()
            if path and type(module).forward is not nn.Module.forward and list(module.parameters())
        ]
        units = {path for path in paths if choose.random() < 0.4} | set(CASES[case].units)
        names = [name for name, _ in model.named_parameters()]
        some = choose.random() < 0.4  # as with adapters, most are frozen
        frozen = tuple(name for name in names[:-1] if some and choose.random() < 0.6)
        world = choose.choice(worlds)
        strategy = choose.choice(STRATEGIES)
        hybrid = strategy.sharding.sharded and strategy.sharding.replicated
        divisors = [n for n in range(1, world + 1) if world % n == 0] if hybrid else [1]
        precision = choose.choice(PRECISIONS)
        run = Run(
            micro_batch=2,
            accumulate=choose.choice([1, 1, 2]),
            sync_each=choose.random() < 0.5,
            strategy=strategy,
            replicas=choose.choice(divisors),
            precision=precision,
            offload=choose.choice(OFFLOADS),
            prefetch=choose.choice(PREFETCHES),
            # torch's AdamW refuses gradients of another dtype than the parameters'.
            optimizer=choose.choice(["adamw", "momentum", "sgd"][int(precision.keep_low_grads) :]),
            align=choose.choice(["element", "row"]),
        )
        return cls(case, tuple(path for path in paths if path in units), frozen, world, run)

    def build(self) -> nn.Module:
        """The plain model."""
        model = make(self.case)
        for name, param in model.named_parameters():
            param.requires_grad_(name not in self.frozen)
        return model

    @property
    def cluster(self) -> Cluster:
        """Where it runs."""
        return Cluster(DEVICE, self.world, self.world, LINK, LINK)


def as_among_threads(script):
    """Without the receive buffers that reduces have on Gloo alone."""
    units = (replace(unit, cost=replace(unit.cost, scratch_bytes=0)) for unit in script.units)
    return replace(script, units=tuple(units))


def described(trace):
    return [(each.op, each.unit, each.bytes, each.live_bytes) for each in trace]


def planned(configuration: Configuration):
    """Traces of the micro-batches of a step, and what rests on each rank that shares slices."""
    run, cluster = configuration.run, configuration.cluster
    ((inputs, targets),) = make_batches(configuration.case, 1, 2)
    dtype = run.precision.compute
    recording = record_step(
        configuration.build(),
        (inputs,),
        loss=lambda output: loss_of(_tensor(output), targets),
        compute_dtype=None if dtype is None else getattr(torch, dtype),
    )
    model = MeasuredModel.of(configuration.case, recording, configuration.units)
    reduces = run.accumulate == 1 or run.sync_each
    first = as_among_threads(write_script(model, run, cluster, reduces=reduces))
    traces = [planned_trace(first, replace(run, accumulate=1), cluster)]
    if run.accumulate > 1:
        second = as_among_threads(write_script(model, run, cluster))
        traces.append(planned_trace(second, run, cluster))
    shards = first.units[0].layout.shards
    resting = [resting_memory(first.units, run, rank=rank, cpu=True) for rank in range(shards)]
    return [described(trace) for trace in traces], resting


def carried_out(configuration: Configuration, where):
    """The same of the engine, on one rank: traces of a second step, and what rests after it."""
    run = configuration.run
    model = configuration.build()
    chosen = {model.get_submodule(path) for path in configuration.units}
    wrapped = FullyShardedDataParallel(
        model,
        where,
        run.strategy,
        CPUOffload(run.offload.params, run.offload.optimizer),
        lambda module, recurse, **_: recurse or module in chosen,
        mixed_precision=_mixed(run.precision),
        align=run.align,
    )
    ensure_tracker(wrapped).set_prefetch(run.prefetch)
    trained = [param for param in wrapped.parameters() if param.requires_grad]
    optimizer = {
        "adamw": torch.optim.AdamW,
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    }[run.optimizer](trained)
    ((inputs, targets),) = make_batches(configuration.case, 1, 2)
    traces = []
    for number in range(3):
        optimizer.zero_grad()
        traces.clear()
        for micro_batch in range(run.accumulate):
            last = micro_batch == run.accumulate - 1
            kept = wrapped.no_sync() if not (last or run.sync_each) else nullcontext()
            with kept, tracing(wrapped) as trace:
                loss_of(_tensor(wrapped(inputs)), targets).backward()
            traces.append(described(trace))
        if number < 2:
            optimizer.step()
    return traces, resting_bytes(wrapped, optimizer)


def _tensor(output):
    output = output["y"] if isinstance(output, dict) else output
    return output.float()


def _mixed(precision: Precision):
    if precision.compute is None and precision.reduce is None:
        return None

    def dtype(name):
        return None if name is None else getattr(torch, name)

    return MixedPrecision(
        dtype(precision.compute),
        dtype(precision.reduce),
        keep_low_precision_grads=precision.keep_low_grads,
    )


def steps_of_random_model(seed: int, world: int):
    """The planned trace of the random model of ``seed`` and those of ranks; None if torch refuses.

    Inputs need gradients for every other seed.
    """

    def train(model):
        inputs = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=seed % 2 == 0)
        loss_of_random(model(inputs)).backward()

    model, units = build(seed)
    try:
        train(model)
    except RuntimeError:
        return None
    inputs = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=seed % 2 == 0)
    recording = record_step(build(seed)[0], (inputs,), loss=loss_of_random)
    units &= {call.module for call in recording.calls}
    in_order = [path for path, _ in model.named_modules() if path in units]
    run = Run(micro_batch=3, precision=Precision(), align="element", optimizer="sgd")
    cluster = Cluster(DEVICE, world, world, LINK, LINK)
    measured = MeasuredModel.of("random", recording, in_order)
    script = as_among_threads(write_script(measured, run, cluster))
    building = threading.Lock()

    def body(comm):
        with building:
            model, _ = build(seed)
        chosen = {model.get_submodule(path) for path in units}
        wrapped = FullyShardedDataParallel(
            model,
            comm,
            auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen,
            align="element",
        )
        for _ in range(2):
            wrapped.zero_grad()
            with tracing(wrapped) as trace:
                train(wrapped)
        return described(trace)

    return described(planned_trace(script, run, cluster)), LocalWorld(world).run(body)


def loss_of_random(output):
    return output["y"].square().mean()
