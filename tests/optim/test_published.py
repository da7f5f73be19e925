# SPDX-License-Identifier: Apache-2.0
"""Mistakes of sharded Muon and 8-bit states that others have published, each with what finds it.

Equality with one process would find all of them; these say what was wrong. Every check is held
against the mistake itself, too, so that it is known to find it.
"""

import copy

import pytest
import torch
from support.owned_matrices import TEMPLATE, batch, full, is_for_muon, loss_of, sharded

from fullshard.core.errors import NotSupportedError
from fullshard.testing import LocalWorld

LR = 0.1
MATRICES = [name for name, _ in TEMPLATE.named_parameters() if is_for_muon(name)]


def updates(kind, world):
    """Return each matrix's change in one step, over the rate, on ranks, in order of names."""

    def body(comm):
        model = sharded(comm)
        before = full(model)
        matrices = [p for n, p in model.named_parameters() if is_for_muon(n)]
        optimizer = kind(matrices, lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        loss_of(model, batch(0, comm.rank)).backward()
        optimizer.step()
        after = full(model)
        return {name: (before[name] - after[name]) / LR for name in MATRICES}

    return LocalWorld(world).run(body)[0]


def is_stepped(update):
    """DeepSpeed #8438: Muon was not run at all."""
    return bool(update.any())


def is_orthogonal(update):
    """DeepSpeed #8442: steps were not orthogonalised."""
    values = torch.linalg.svdvals(update)
    return bool(values.median() > 0.5 * values.max())  # some are 0: a batch has few tokens


def has_the_scale_of_the_whole(update):
    """Megatron-LM #5974, Automodel #3191: steps were scaled wrongly, here as by a part's shape.

    Torch's iterations take singular values to 0.7 to 1.2, times 0.2 sqrt(the longer side) here.
    """
    largest = torch.linalg.svdvals(update).max() / (0.2 * max(update.shape) ** 0.5)
    return 1.0 < float(largest) < 1.25


CHECKS = [is_stepped, is_orthogonal, has_the_scale_of_the_whole]


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 8])
def test_updates_are_those_of_whole_matrices(world):
    for name, update in updates(torch.optim.Muon, world).items():
        assert [check.__name__ for check in CHECKS if not check(update)] == [], name


def faulty(change):
    class Faulty(torch.optim.Muon):
        def step(self, closure=None):
            params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            before = [param.detach().clone() for param in params]
            super().step(closure)
            for param, start in zip(params, before, strict=True):
                param.data.copy_(start - LR * change((start - param) / LR, param.grad))

    return Faulty


FAULTS = {
    is_orthogonal: lambda update, grad: grad / grad.norm() * update.norm(),
    has_the_scale_of_the_whole: lambda update, grad: update / 3**0.5,  # a third of the rows
}


@pytest.mark.parametrize("check", FAULTS)
def test_the_mistake_is_found(check):
    found = updates(faulty(FAULTS[check]), 3)
    assert not any(check(update) for update in found.values())


def test_an_optimizer_that_leaves_matrices_as_they_are_is_refused():
    assert not is_stepped(torch.zeros(3, 4))
    with pytest.raises(NotSupportedError, match="leaves them as they are"):
        updates(faulty(lambda update, grad: update * 0), 2)


def test_momentum_of_a_matrix_rests_on_one_rank_alone():
    """FSDP2's naive way computes every matrix on every rank."""

    def body(comm):
        model = sharded(comm)
        optimizer = torch.optim.Muon([p for n, p in model.named_parameters() if is_for_muon(n)])
        loss_of(model, batch(0, comm.rank)).backward()
        optimizer.step()
        return sum(s["momentum_buffer"].local.numel() for s in optimizer.state.values())

    matrices = [p.numel() for n, p in copy.deepcopy(TEMPLATE).named_parameters() if is_for_muon(n)]
    assert sum(LocalWorld(4).run(body)) == sum(matrices)
