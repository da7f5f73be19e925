# SPDX-License-Identifier: Apache-2.0
"""A trial tells which optimizers step each matrix apart from the others."""

import re

import pytest
import torch
from torch import nn

from fullshard.torch.state.apart import looks_beyond, steps_apart


class Clipping(torch.optim.SGD):
    """One norm of all gradients, as of timm's Lamb."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


class Averaging(torch.optim.SGD):
    """One step size from all gradients, as of D-Adaptation and Prodigy."""

    def step(self, closure=None):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.param_groups[0]["lr"] = 1 / (1 + sum(float(grad.abs().sum()) for grad in grads))
        return super().step(closure)


class Estimating(torch.optim.SGD):
    """One step size that grows with the way that all have come, as of Prodigy."""

    grows = True

    @torch.no_grad()
    def step(self, closure=None):
        group, way = self.param_groups[0], 0.0
        for param in group["params"]:
            if param.grad is not None:
                start = self.state[param].setdefault("start", param.detach().clone())
                way += float((param.grad * (start - param)).sum() / param.grad.norm())
        group["way"] = max(group.get("way", 1e-3), way)
        for param in group["params"]:
            if param.grad is not None:
                param -= param.grad.sign() * (group["way"] if self.grows else 1e-3)


class Counting(Estimating):
    """Knows the way, and does not use it yet."""

    grows = False


class Alike(torch.optim.SGD):
    """One norm of all matrices of a shape, as where these are stacked."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for param in params:
            stack = torch.stack([p.grad for p in params if p.shape == param.shape])
            param -= param.grad / stack.norm()


class Drawing(torch.optim.SGD):
    """Random numbers, of which a matrix gets others when it is stepped alone."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(torch.rand(()))
        return super().step(closure)


class Gathering(torch.optim.SGD):
    """Speaks with other ranks itself, as of Dion and DistributedMuon."""

    def step(self, closure=None):
        for group in self.param_groups:
            torch.ops._c10d_functional.all_reduce(group["params"][0].grad, "sum", "0")
        return super().step(closure)


class Keeping(torch.optim.SGD):
    """Steps a list of its own in place of its groups."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.kept = list(self.param_groups[0]["params"])

    def step(self, closure=None):
        for param in self.kept:
            param.data.add_(1.0)


class Exploding(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.fill_(float("inf"))


class Apart(torch.optim.SGD):
    """A norm of each, steps that are counted, and a list in its state."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    history = self.state[param].setdefault("history", [])
                    history.append(param.grad.norm())
                    param.data.sub_(param.grad / (history[-1] * self.count), alpha=group["lr"])


def matrices():
    return [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3, 4))]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Clipping, "in another way if there are others"),
        (Averaging, "in another way if there are others"),
        (Estimating, "in another way if there are others"),
        (Alike, "in another way if there are others"),
        (Counting, "keeps other numbers for all if there are others"),
        (Drawing, "draws random numbers"),
        (Gathering, "communicates"),
        (Keeping, "leaves them as they are"),
        (Exploding, "no finite numbers"),
        (torch.optim.LBFGS, "dot products over all parameters"),
    ],
)
def test_what_looks_beyond_a_matrix_is_found(kind, said):
    optimizer = kind(matrices(), lr=1e-3)
    assert re.search(said, looks_beyond(optimizer) or "")


@pytest.mark.parametrize("lr", [0.0, 1e-9, torch.tensor(0.0)])
def test_a_trial_changes_nothing_of_the_optimizer_and_finds_a_rate_that_shows(lr):
    params = matrices()
    optimizer = Apart(params, lr=lr)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.step = optimizer.step  # bound, as a scheduler leaves it
    group, numbers = dict(optimizer.param_groups[0]), torch.get_rng_state()
    assert looks_beyond(optimizer) is None
    assert steps_apart(optimizer)
    assert optimizer.param_groups[0] == group
    assert (optimizer.count, dict(optimizer.state), called) == (0, {}, [])
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)


def test_a_group_without_a_rate_is_tried_without_one():
    class Relative(Apart):
        def step(self, closure=None):
            assert self.param_groups[0]["lr"] is None
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    if param.grad is not None:
                        param.sub_(param.grad, alpha=0.1)

    optimizer = Relative(matrices(), lr=1e-3)
    optimizer.param_groups[0]["lr"] = None
    assert looks_beyond(optimizer) is None


def test_an_optimizer_is_tried_anew_when_it_has_more_groups():
    class Picky(Apart):
        def step(self, closure=None):
            super().step(closure)
            if any(group.get("clip") for group in self.param_groups):
                Clipping.step(self, closure)

    optimizer = Picky(matrices(), lr=1e-3)
    assert looks_beyond(optimizer) is None
    optimizer.add_param_group({"params": matrices(), "clip": True})
    assert looks_beyond(optimizer) is not None


def test_elementwise_optimizers_of_torch_need_no_trial():
    class Asked(torch.optim.AdamW):
        """Has a method more, and steps as ever."""

        def ask(self):
            return self.param_groups

    for kind in (Asked, torch.optim.AdamW):
        optimizer = kind(matrices())
        assert not steps_apart(optimizer)
        assert "_fullshard_looks_beyond" not in optimizer.__dict__
    assert steps_apart(type("Own", (Asked,), {"step": lambda self: Asked.step(self)})(matrices()))
