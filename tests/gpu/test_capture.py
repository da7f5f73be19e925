# SPDX-License-Identifier: Apache-2.0
"""A step captured as a CUDA graph has the losses of steps without, also those in between."""

import torch
import torch.distributed as dist
from support.stack import Stack

from fullshard.torch import MixedPrecisionPolicy, capture_step, fully_shard
from fullshard.torch.comm.protocol import SoloComm

WIDTH, LAYERS, STEPS = 256, 3, 4
# In bf16 one rank gathers and frees like many.
BF16 = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)


def train(gpu, mesh, captured):
    """Return the losses of some steps, with a graph or without, and one without at the end."""
    torch.manual_seed(0)
    model = Stack(LAYERS, WIDTH).to(gpu)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(64, WIDTH, dtype=torch.bfloat16, device=gpu)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    run = capture_step(model, step).replay if captured else step
    losses = []
    for number in range(STEPS):
        x.copy_(torch.full_like(x, 1 + number))
        losses.append(run().clone())
        optimizer.step()
        optimizer.zero_grad()
    losses.append(step())
    return torch.stack(losses)


def test_a_captured_step_has_the_losses_of_steps_without(gpu):
    expected = train(gpu, SoloComm(), captured=False)
    assert torch.equal(train(gpu, SoloComm(), captured=True), expected)
    assert len(set(expected.tolist())) == STEPS + 1


def test_a_captured_step_over_nccl(gpu, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        expected = train(gpu, mesh, captured=False)
        assert torch.equal(train(gpu, mesh, captured=True), expected)
    finally:
        dist.destroy_process_group()
