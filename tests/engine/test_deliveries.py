# SPDX-License-Identifier: Apache-2.0
"""Gradients that take the way into a unit's buffer in groups, as on a device."""

import pytest
import torch
from support.models import loss_of, make, make_batches
from support.training import shard

from fullshard.testing import LocalWorld
from fullshard.torch.unit import gradients
from fullshard.torch.unit.packing import Deliveries

GPU = torch.device("cuda", 0)  # no tensor is put there


def test_small_ones_wait_for_others():
    buffer = torch.zeros(128)
    deliveries = Deliveries([(64, torch.float32), (64, torch.float32)], GPU)  # 16 elements wait
    deliveries.put([buffer[:20]], [torch.full((20,), 1.0)])
    assert (buffer[:20].sum(), deliveries.bytes) == (20, 0)  # large: at once
    deliveries.put([buffer[20:25], buffer[25:30]], [torch.full((5,), 2.0)] * 2)
    assert (buffer[20:].sum(), deliveries.bytes) == (0, 40)
    deliveries.put([buffer[30:40]], [torch.full((10,), 3.0)])  # no room for both
    assert (buffer[20:30].sum(), buffer[30:].sum(), deliveries.bytes) == (20, 0, 40)
    deliveries.flush()
    assert (buffer.sum(), deliveries.bytes) == (70, 0)
    deliveries.put([buffer[:1]], [torch.full((1,), 9.0)])
    deliveries.clear()
    deliveries.flush()
    assert buffer.sum() == 70
    on_host = Deliveries([(128, torch.float32)], torch.device("cpu"))
    on_host.put([buffer[:1]], [torch.full((1,), 9.0)])
    assert (buffer[0], on_host.bytes) == (9, 0)


@pytest.mark.parametrize("name", ["gpt", "twice", "odd"])
def test_gradients_are_the_same(name, monkeypatch):
    """Also with several backwards before a reduce, where gradients are added up."""

    def body(comm):
        model = shard(make(name), name, comm, door="function")
        first, second = make_batches(name, 2, 2)
        model.set_requires_gradient_sync(False)
        loss_of(model(first[0]), first[1]).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model(second[0]), second[1]).backward()
        return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}

    apart = LocalWorld(2).run(body)[0]
    monkeypatch.setattr(gradients, "Deliveries", lambda sizes, device: Deliveries(sizes, GPU))
    together = LocalWorld(2).run(body)[0]
    assert apart.keys() == together.keys()
    for key, value in apart.items():
        assert torch.equal(value, together[key]), key
