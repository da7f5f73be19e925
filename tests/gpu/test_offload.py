# SPDX-License-Identifier: Apache-2.0
"""What rests on the host: where it lies, that it is page-locked, and that values do not change."""

import pytest
import torch
from gpu.stream_world import StreamWorld
from gpu.training import build, shard
from support.models import loss_of, make_batches

from fullshard.torch import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel
from fullshard.torch.step.managed import managed_unit_of


def wrapped(model, where, offload):
    blocks = set(model.blocks)
    return FullyShardedDataParallel(
        model,
        where,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in blocks,
        cpu_offload=offload,
    )


DOORS = {
    "params": lambda m, c: shard(m, c, offload_policy=CPUOffloadPolicy()),
    "params, unpinned": lambda m, c: shard(m, c, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "params, wrapper": lambda m, c: wrapped(m, c, CPUOffload(offload_params=True)),
    "optimizer": lambda m, c: wrapped(m, c, CPUOffload(offload_optimizer=True)),
}


@pytest.mark.parametrize("door", DOORS)
def test_where_things_rest(door, device):
    def body(comm):
        model = DOORS[door](build(device), comm)
        tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
        loss_of(model(tokens), targets).backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        pinned = device.type == "cuda" and "unpinned" not in door
        for param in model.parameters():
            assert param.device.type == param.grad.device.type == "cpu"
            if param.local.numel():
                assert param.local.is_pinned() == param.grad.local.is_pinned() == pinned
            assert all(v.device.type == "cpu" for v in optimizer.state[param].values())
        unit = managed_unit_of(model.blocks[0]).unit
        assert all(full.device.type == device.type for full in unit.full.params)
        assert unit.transient_bytes == 0

    StreamWorld(2, device).run(body)


def test_an_optimizer_loop_on_the_host_sees_every_gradient(device):
    """Accumulated over backwards, read by the host at once, each time."""

    def body(comm):
        model = shard(build(device), comm, offload_policy=CPUOffloadPolicy())
        tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
        sums = []
        for _ in range(4):
            loss_of(model(tokens), targets).backward()
            sums.append(torch.stack([p.grad.local.sum() for p in model.parameters()]))
        return sums

    for sums in StreamWorld(2, device).run(body):
        for times, found in enumerate(sums, 1):
            torch.testing.assert_close(found, times * sums[0], rtol=1e-9, atol=1e-12)
