# SPDX-License-Identifier: Apache-2.0
"""Stages of `torch.distributed.pipelining`, each sharded over its own ranks, as one process."""

from functools import cache

import pytest
import torch
from support.pipeline_workers import (
    LEARNING_RATE,
    MICRO_BATCHES,
    STAGES,
    batches,
    train,
    whole,
)
from support.stack import LAYERS
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe


@cache
def in_one_process():
    model, losses = whole(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for inputs, targets in batches():
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_two_stages_of_two_ranks(gloo_world, schedule, door):
    """Several forwards before a backward; each backward reduces, and nothing twice."""
    expected_losses, expected = in_one_process()
    found = {}
    for rank, (params, losses, ops) in enumerate(gloo_world.run(4, train, schedule, door)):
        stage = rank // 2
        assert (not losses) == (stage < STAGES - 1)
        assert losses in ([], pytest.approx(expected_losses, abs=1e-12))
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
        found.update(params)
        for op, passes in (("gather", 2), ("reduce", 1)):
            done = [unit for kind, unit, _ in ops if kind == op]
            assert len(done) <= passes * MICRO_BATCHES * LAYERS // STAGES
        assert ops[-1][2] == 0, "nothing stays full when a step is over"
    assert found.keys() == expected.keys()
