# SPDX-License-Identifier: Apache-2.0
"""A step's cost on the simulated device: kernels, bytes and a modelled time, ours beside FSDP2's.

A model, not a measurement. A kernel takes its floating-point work or its bytes at the device's
rates (`machine.Costs`), whichever is longer; streams run side by side and do not slow each other;
collectives take the link in the order in which they are issued; the host takes no time, but for an
optimizer's step where parameters are offloaded.
"""

from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention, silu

from device.machine import COMPUTE, THREADS, Costs, Machine
from device.world import on_device, rank_of_job
from fullshard import torch as ours
from fullshard.core.strategy import Sharding
from fullshard.torch.comm import ranks

RANKS = 8
FULL_SHARD = Sharding(sharded=True, reshard_after_forward=True, replicated=False)
TOKENS = 2048
KINDS = ("all_gather", "reduce_scatter")
REDUCES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DOORS = {
    "fullshard": (partial(ours.fully_shard, check_values=False), ours.MixedPrecisionPolicy),
    "FSDP2": (theirs.fully_shard, theirs.MixedPrecisionPolicy),
}


@dataclass(frozen=True)
class Figures:
    """One step, forward and backward, without the optimizer's."""

    engine: str
    blocks: int
    reduces: str
    link_gb_per_s: float
    compute_launches: int
    other_launches: int  # on other streams, without collectives
    compute_bytes: int
    other_bytes: int
    collectives: int
    step_ms: float


class Block(nn.Module):
    """A block as wide as those of an 8-billion-parameter Llama: 218 million parameters."""

    def __init__(self, dtype, width=4096, inner=14336, heads=32, shared=8):
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.before_attention = nn.RMSNorm(width, dtype=dtype)
        self.query = linear(width, width)
        self.key = linear(width, shared * self.size)
        self.value = linear(width, shared * self.size)
        self.out = linear(width, width)
        self.before_mlp = nn.RMSNorm(width, dtype=dtype)
        self.gate = linear(width, inner)
        self.up = linear(width, inner)
        self.down = linear(inner, width)

    def forward(self, x):
        seen = self.before_attention(x)
        query, key, value = (
            layer(seen).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        key, value = (each.repeat_interleave(self.heads // self.shared, 1) for each in (key, value))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        seen = self.before_mlp(x)
        return x + self.down(silu(self.gate(seen)) * self.up(seen))


class Blocks(nn.Sequential):
    """Blocks that run in the order of ``order``: all of them, unless it says otherwise."""

    def forward(self, x):
        for number in self.order:
            x = self[number](x)
        return x


# GB/s
LINKS = (40.0, 100.0, 300.0)


def steps_of(engine, blocks, reduces="fp32", links=LINKS, orders=()):
    """`Figures` of the last step for each of ``links``: the third, or the last of ``orders``.

    ``engine`` may be "plain": one process, without shards. ``orders`` names for each step the
    blocks that run, in their order.
    """
    costs = Costs(link_bytes_per_s=np.array(links) * 1e9)
    with rank_of_job(0, RANKS, Machine(costs=costs)) as machine:
        mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shard",))
        ranks.ranks_of(mesh, FULL_SHARD)
        with on_device(machine):
            model = model_of(engine, blocks, reduces, mesh)
            for order in orders or [range(blocks)] * 3:
                model.order = order
                begin_s, first = machine.now_s, len(machine.launches)
                x = torch.zeros(1, TOKENS, 4096, dtype=torch.bfloat16, device="cuda")
                model(x).float().square().mean().backward()
                for param in model.parameters():
                    param.grad = None
            ended_s = machine.now_s
        assert not machine.findings, machine.findings
    launches = [each for each in machine.launches[first:] if each.timeline not in THREADS]
    collectives = [each for each in launches if each.what in KINDS]
    kernels = [each for each in launches if each.what not in KINDS]
    compute = [each for each in kernels if each.timeline == COMPUTE]
    others = [each for each in kernels if each.timeline != COMPUTE]
    counts = (len(compute), len(others), *(sum(t.size for t in each) for each in (compute, others)))
    took_ms = np.broadcast_to((ended_s - begin_s) * 1e3, len(links))
    return [
        Figures(engine, blocks, reduces, link, *counts, len(collectives), round(float(each_ms), 2))
        for link, each_ms in zip(links, took_ms, strict=True)
    ]


def model_of(engine, blocks, reduces, mesh):
    dtype = torch.bfloat16 if engine == "plain" else torch.float32
    with torch.device("cuda"):
        model = Blocks(*(Block(dtype) for _ in range(blocks)))
    if engine == "plain":
        return model
    door, policy = DOORS[engine]
    precision = policy(param_dtype=torch.bfloat16, reduce_dtype=REDUCES[reduces])
    for block in model:
        door(block, mesh=mesh, mp_policy=precision)
    return door(model, mesh=mesh, mp_policy=precision)


# (engine, blocks, reduces): all, and those of every day
CASES = [
    (engine, blocks, reduces)
    for blocks in (2, 4, 8, 16, 32)
    for reduces in REDUCES
    for engine in ("plain", *DOORS)
]
FEW_CASES = [case for case in CASES if case[1] == 2 and case[2] == "bf16"]

# Four blocks in other orders than before, reduced in bf16 at 100 GB/s: what runs, the last timed.
USUAL = [range(4)] * 3
ORDERS = {
    "as before": USUAL,
    "one block dropped": [*USUAL, (0, 1, 3)],
    "all again after one was dropped": [*USUAL, (0, 1, 3), range(4)],
    "two blocks swapped": [*USUAL, (0, 2, 1, 3)],
    "two models in turn": [(0, 1), (2, 3)] * 3,
    "in an order never seen": [*USUAL, (2, 0, 3, 1), (1, 3, 0, 2), (3, 2, 1, 0), (0, 2, 3, 1)],
}


def orders(names=tuple(ORDERS)):
    """A dict for each of ``names`` of `ORDERS` and engine."""
    for name in names:
        for engine in DOORS:
            (step,) = steps_of(engine, 4, "bf16", (100.0,), ORDERS[name])
            yield {"order": name, **asdict(step)}


# Blocks, tokens, width and inner width of models whose parameters rest on the host, and how many
# bytes a second its AdamW reads and writes for a rank.
OFFLOADED = (
    (8, 1024, 4096, 14336, 50e9),
    (16, 512, 4096, 14336, 25e9),
    (4, 1024, 8192, 28672, 25e9),
)


def offloaded(shapes=OFFLOADED):
    """A dict for each of ``shapes`` and way to step: its third step, and what bounds it, in ms."""
    for blocks, tokens, width, inner, rate in shapes:
        for beside in (None, "backward", "forward"):
            costs = Costs(link_bytes_per_s=300e9, update_bytes_per_s=rate)
            with rank_of_job(0, RANKS, Machine(costs=costs)) as machine:
                mesh = init_device_mesh("cuda", (RANKS,), mesh_dim_names=("shard",))
                ranks.ranks_of(mesh, FULL_SHARD)
                with on_device(machine):
                    model = Blocks(*(Block(torch.float32, width, inner) for _ in range(blocks)))
                    model.order = range(blocks)
                    optimizer = _offloaded(model, mesh, beside)
                    for _ in range(3):
                        begin_s, first = machine.now_s, len(machine.launches)
                        x = torch.zeros(1, tokens, width, dtype=torch.bfloat16, device="cuda")
                        model(x).float().square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    step_ms = (machine.now_s - begin_s) * 1e3
            assert not machine.findings, machine.findings
            launches = machine.launches[first:]
            update = sum(each.size for each in launches if each.timeline in THREADS) / rate
            copies = {each.timeline: 0.0 for each in launches if each.crosses}
            for each in launches:
                if each.crosses:
                    copies[each.timeline] += each.size / 2 / costs.host_bytes_per_s
            yield {
                "offloaded": f"beside {beside}" if beside else "after backward",
                "shape": [blocks, tokens, width, inner, rate],
                "step_ms": round(float(step_ms), 2),
                "update_ms": round(update * 1e3, 2),
                "copies_ms": round(max(copies.values()) * 1e3, 2),
            }


def _offloaded(model, mesh, beside):
    options = {
        "mp_policy": ours.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        "offload_policy": ours.CPUOffloadPolicy(),
        "check_values": False,
        "mesh": mesh,
    }
    for block in model:
        ours.fully_shard(block, **options)
    optimizer = torch.optim.AdamW(ours.fully_shard(model, **options).parameters(), fused=True)
    if beside is not None:
        ours.overlap_optimizer(model, optimizer, beside=beside)
    return optimizer


def lines(cases):
    """A dict for each case and link."""
    for case in cases:
        for figures in steps_of(*case):
            yield {"cost": True, **asdict(figures)}


def table(found):
    """The lines of ``CASES`` as a table of Markdown: beyond the plain model, a block and step."""
    by_case = {(f["engine"], f["blocks"], f["reduces"], f["link_gb_per_s"]): f for f in found}
    engines = list(DOORS)
    head = ["blocks", "reduced in", *(f"{link:g} GB/s, ms" for link in LINKS)]
    head += ["launches a block", "GB a block, stream of computation", "GB a block, other streams"]
    rows = [head, ["---"] * len(head)]
    for blocks in sorted({case[1] for case in by_case}):
        for reduces in REDUCES:
            plain = by_case["plain", blocks, reduces, LINKS[0]]
            ours, other = ([by_case[e, blocks, reduces, link] for link in LINKS] for e in engines)
            cells = [str(blocks), reduces]
            cells += [
                f"{a['step_ms']:.1f} / {b['step_ms']:.1f}" for a, b in zip(ours, other, strict=True)
            ]
            pair = [ours[0], other[0]]
            beyond = [
                each["compute_launches"] - plain["compute_launches"] + each["other_launches"]
                for each in pair
            ]
            cells.append(" / ".join(f"{each / blocks:.1f}" for each in beyond))
            beyond = [each["compute_bytes"] - plain["compute_bytes"] for each in pair]
            cells.append(" / ".join(f"{each / blocks / 1e9:.2f}" for each in beyond))
            cells.append(" / ".join(f"{each['other_bytes'] / blocks / 1e9:.2f}" for each in pair))
            rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
