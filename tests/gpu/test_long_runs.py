# SPDX-License-Identifier: Apache-2.0
"""Two hundred steps hold the same memory after each: nothing grows, not by a byte."""

import gc

import pytest
import torch
from support.stack import Stack

from fullshard.torch import (
    CommunicationCompression,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    overlap_optimizer,
    use_memory_pool,
)
from fullshard.torch.unit.buffers import MemorySource

WIDTH, LAYERS, STEPS, WARM_UP = 256, 4, 200, 2
BF16 = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)


class TwoWays(Stack):
    """Runs its blocks in turn, or backwards."""

    backwards = False

    def forward(self, x):
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = block(x)
        return x


def beside(where):
    return lambda model, optimizer: overlap_optimizer(model, optimizer, beside=where)


def with_pool(model, optimizer):
    use_memory_pool(model)


WAYS = {
    "by row": ({}, None),
    "elements": ({"align": "element"}, None),
    "kept after forward": ({"reshard_after_forward": False}, None),
    "offload": ({"offload_policy": CPUOffloadPolicy()}, None),
    "beside backward": ({}, beside("backward")),
    "beside forward": ({}, beside("forward")),
    "beside backward, offload": ({"offload_policy": CPUOffloadPolicy()}, beside("backward")),
    "compression": ({"compression": CommunicationCompression("int8", "int8")}, None),
    "pool": ({}, with_pool),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_grows(way, nccl, gpu, monkeypatch):
    """Looked at after every ten steps, with one backwards and one evaluation among them."""
    monkeypatch.setattr(MemorySource, "_of", {})
    options, prepare = WAYS[way]
    model = TwoWays(LAYERS, WIDTH).to(gpu)
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16, **options)
    fully_shard(model, mp_policy=BF16, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if prepare is not None:
        prepare(model, optimizer)
    x = torch.ones(32, WIDTH, dtype=torch.bfloat16, device=gpu)
    held = []
    gc.collect()
    gc.disable()  # what only its passes free would be growth for those who have turned it off
    try:
        for number in range(STEPS):
            model.backwards = number % 10 == 3
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 7:
                with torch.no_grad():
                    model(x)
            if number % 10 == 9:
                torch.cuda.synchronize(gpu)
                held.append((torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)))
    finally:
        gc.enable()
    assert len(set(held[WARM_UP:])) == 1, held
