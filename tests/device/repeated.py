# SPDX-License-Identifier: Apache-2.0
"""Is one step the next one again, as a captured graph would replay it?

The same kernels and collectives, in one order, on the same streams and the same addresses. Those
are what an allocator gives that always takes the lowest free place for a size on a stream: so they
are the same where memory is got and given back in the same order, and nothing stays behind.
"""

from collections import defaultdict

import torch
from torch.distributed.device_mesh import init_device_mesh

from device import cost
from device.machine import HOST, Machine
from device.world import on_device, rank_of_job
from fullshard.torch.comm import ranks

BLOCKS, TOKENS, BEFORE = 3, 16, 3  # steps that may differ: schedules and state are made
OPTIMIZER = {"bf16": {"fused": True}, "fp32": {"foreach": True}}  # by what gradients travel in


class Diary(Machine):
    """A machine that notes what its device does, and where."""

    def __init__(self):
        super().__init__()
        self.notes = []
        self._taken = defaultdict(set)  # by size and stream

    def _place(self, memory):
        place = memory.__dict__.get("place")
        if place is None:
            taken = self._taken[memory.size, memory.home]
            number = next(n for n in range(len(taken) + 1) if n not in taken)
            taken.add(number)
            place = memory.place = (memory.size, memory.home, number)
        return place

    def allocate(self, size, home, label, *, pinned=False):
        memory = super().allocate(size, home, label, pinned=pinned)
        self.notes.append(("allocate", self._place(memory)))
        return memory

    def free(self, memory):
        super().free(memory)
        size, home, number = self._place(memory)
        self._taken[size, home].discard(number)
        self.notes.append(("free", (size, home, number)))

    def touch(self, memory, span, write, timeline, what, *, again=False):
        super().touch(memory, span, write, timeline, what, again=again)
        if timeline != HOST:
            self.notes.append((what, timeline, self._place(memory), span, write))


def repeated(reduces, steps):
    """Compare ``steps`` of a model and AdamW; tell what the first that differs does otherwise."""
    with rank_of_job(0, cost.RANKS, Diary()) as machine:
        mesh = init_device_mesh("cuda", (cost.RANKS,), mesh_dim_names=("shard",))
        ranks.ranks_of(mesh, cost.FULL_SHARD)
        with on_device(machine):
            model = cost.model_of("fullshard", BLOCKS, reduces, mesh)
            model.order = range(BLOCKS)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **OPTIMIZER[reduces])
            x = torch.zeros(1, TOKENS, 4096, dtype=torch.bfloat16, device="cuda")
            usual, differs = None, None
            for step in range(BEFORE + steps):
                machine.notes = []
                if step <= BEFORE:
                    machine.questions = 0
                    machine.syncs.clear()
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == BEFORE:
                    usual = machine.notes
                elif step > BEFORE and differs is None and machine.notes != usual:
                    pairs = zip(machine.notes, usual, strict=False)
                    differs = [step, *next((p for p in pairs if p[0] != p[1]), ("length",))]
    return {
        "repeated": steps,
        "reduces": reduces,
        "notes": len(usual),
        "asked": machine.questions,
        "waited": dict(machine.syncs),
        "differs": None if differs is None else repr(differs),
    }
