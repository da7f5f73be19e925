# SPDX-License-Identifier: Apache-2.0
"""Units on different meshes in one model, with one global norm."""

import pytest
import torch
from support.expert_workers import batches, train, update, whole

RANKS = 4


def in_one_process():
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for inputs in batches(RANKS):
        outputs = [model(each, rank // 2) for rank, each in enumerate(inputs)]
        torch.stack(outputs).square().mean().backward()
        norms.append(update(model, optimizer))
    return norms, dict(model.named_parameters())


def test_experts_beside_what_all_ranks_share(gloo_world):
    expected_norms, expected = in_one_process()
    for norms, params in gloo_world.run(RANKS, train):
        assert norms == pytest.approx(expected_norms, abs=1e-12)
        assert params.keys() == expected.keys()
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=1e-10)
