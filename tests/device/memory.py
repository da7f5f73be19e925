# SPDX-License-Identifier: Apache-2.0
"""The memory of a step on the simulated device, ours beside FSDP2's, under both conditions.

At rest: sharded parameters and gradients. Allocated: the peak beyond it. Reserved: the same if no
stream is given what another one has freed, as the caching allocator does it, without what it loses
by cutting blocks. In units of what a block takes in full, in the dtype of computation.
"""

from functools import partial

import torch
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

from device.cost import FULL_SHARD, RANKS, Block, Blocks
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
_OURS = partial(ours.fully_shard, check_values=False)
ENGINES = {
    "fullshard, by row": (_OURS, ours.MixedPrecisionPolicy),
    "fullshard, by element": (partial(_OURS, align="element"), ours.MixedPrecisionPolicy),
    "FSDP2": (theirs.fully_shard, theirs.MixedPrecisionPolicy),
}


def memory_of(engine, dtypes, condition):
    """The third step's memory, forward and backward, on one token."""
    at_once = CONDITIONS[condition]
    door, policy = ENGINES[engine]
    param_dtype, reduce_dtype = DTYPES[dtypes]
    precision = policy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    with rank_of_job(0, RANKS, Machine(lambda: at_once, completes_at_once=at_once)) as machine:
        mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shard",))
        ranks.ranks_of(mesh, FULL_SHARD)
        with on_device(machine):
            with torch.device("cuda"):
                model = Blocks(*(Block(torch.float32) for _ in range(BLOCKS)))
            unit_bytes = sum(p.numel() for p in model[0].parameters())
            unit_bytes *= (param_dtype or torch.float32).itemsize
            model.order = range(BLOCKS)
            for block in model:
                door(block, mesh=mesh, mp_policy=precision)
            door(model, mesh=mesh, mp_policy=precision)
            for _ in range(3):
                x = torch.zeros(1, 1, 4096, device="cuda")
                for param in model.parameters():
                    param.grad = None
                machine.held.watch()
                model(x).float().square().mean().backward()
                rest_bytes = machine.held.total_bytes
        assert not machine.findings, machine.findings
    return {
        "engine": engine,
        "dtypes": dtypes,
        "reduces complete": condition,
        "allocated_units": round((machine.held.peak_bytes - rest_bytes) / unit_bytes, 2),
        "reserved_units": round((machine.held.reserved_bytes - rest_bytes) / unit_bytes, 2),
    }


CASES = [(e, dtypes, condition) for dtypes in DTYPES for condition in CONDITIONS for e in ENGINES]
FEW_CASES = [
    (engine, dtypes, "when waited for")
    for dtypes in ("fp32", "bf16, reduced in fp32")
    for engine in ("fullshard, by row", "FSDP2")
]
