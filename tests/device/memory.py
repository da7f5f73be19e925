# SPDX-License-Identifier: Apache-2.0
"""The memory of a step on the simulated device, ours beside FSDP2's, under both conditions.

At rest: sharded parameters and gradients. Allocated: the peak beyond it. Reserved: the same if no
stream is given what another one has freed, as the caching allocator does it, without what it loses
by cutting blocks. In units of what a block takes in full, in the dtype of computation.
"""

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

from device.cost import FULL_SHARD, ORDERS, RANKS, Block, Blocks
from device.machine import Machine
from device.world import on_device, rank_of_job
from fullshard import torch as ours
from fullshard.torch.comm import ranks

BLOCKS = 4
DTYPES = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, reduced in fp32": (torch.bfloat16, torch.float32),
}
CONDITIONS = {"at once": True, "when waited for": False}
MODES = {"sharded": (RANKS,), "hybrid": (2, RANKS // 2), "offloaded": (RANKS,)}  # and its mesh
_OURS = partial(ours.fully_shard, check_values=False)
ENGINES = {
    "fullshard, by row": (_OURS, ours),
    "fullshard, by element": (partial(_OURS, align="element"), ours),
    "FSDP2": (theirs.fully_shard, theirs),
}


def memory_of(engine, dtypes, condition, mode="sharded", orders=(range(BLOCKS),) * 3):
    """The last step's memory, forward and backward, on one token; blocks run in these ``orders``.

    What a step has reserved stays with its stream: that is of all but the first two.
    """
    at_once = CONDITIONS[condition]
    door, policies = ENGINES[engine]
    param_dtype, reduce_dtype = DTYPES[dtypes]
    precision = policies.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    away = mode == "offloaded"
    options = {"offload_policy": policies.CPUOffloadPolicy()} if away else {}
    options |= {"mp_policy": precision}
    with rank_of_job(0, RANKS, Machine(lambda: at_once, completes_at_once=at_once)) as machine:
        shape = MODES[mode]
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
        ranks.ranks_of(mesh, replace(FULL_SHARD, replicated=mesh.ndim == 2))
        with on_device(machine):
            with torch.device("cpu" if away else "cuda"):
                model = Blocks(*(Block(torch.float32) for _ in range(BLOCKS)))
            unit_bytes = sum(p.numel() for p in model[0].parameters())
            unit_bytes *= (param_dtype or torch.float32).itemsize
            for block in model:
                door(block, mesh=mesh, **options)
            door(model, mesh=mesh, **options)
            reserved = Counter()
            for number, model.order in enumerate(orders):
                x = torch.zeros(1, 1, 4096, device="cuda")
                for param in model.parameters():
                    param.grad = None
                machine.held.watch()
                model(x).float().square().mean().backward()
                rest_bytes = machine.held.total_bytes
                reserved |= machine.held.peaks if number > 1 else {}
            grads = [param.grad for param in model.parameters()]
            left = machine.memories.bytes_beyond([*model.parameters(), *grads])
        assert not machine.findings, machine.findings
    return {
        "engine": engine,
        "dtypes": dtypes,
        "reduces complete": condition,
        "mode": mode,
        "left_units": round(left / unit_bytes, 2),
        "allocated_units": round((machine.held.peak_bytes - rest_bytes) / unit_bytes, 2),
        "reserved_units": round((reserved.total() - rest_bytes) / unit_bytes, 2),
    }


LATE = "when waited for"
CASES = [
    *((e, dtypes, when, "sharded") for dtypes in DTYPES for when in CONDITIONS for e in ENGINES),
    *((e, dtypes, LATE, "hybrid") for dtypes in DTYPES for e in ENGINES),
    *((e, dtypes, LATE, "offloaded") for dtypes in DTYPES for e in list(ENGINES)[:2]),
]
FEW_CASES = [
    (engine, *case)
    for case in (("fp32", LATE, "sharded"), ("bf16, reduced in fp32", LATE, "hybrid"))
    for engine in ("fullshard, by row", "FSDP2")
]


def changed(names=tuple(ORDERS), engines=("fullshard, by row", "FSDP2")):
    """A dict for each of ``names`` of `device.cost.ORDERS` and engine, in bf16."""
    for name in names:
        for engine in engines:
            found = memory_of(engine, "bf16", LATE, orders=ORDERS[name])
            yield {"memory in order": name, "engine": engine} | {
                key: found[key] for key in ("allocated_units", "reserved_units")
            }
