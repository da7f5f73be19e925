# SPDX-License-Identifier: Apache-2.0
"""A model with matrices for Muon and its kin, in one process and over owned matrices."""

import copy
import logging
import sys
import threading
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from support.beside import params_of, shard
from torch import nn
from torch.optim import _muon

import fullshard.torch as fs
from fullshard.testing import LocalComm

STEPS = 5


def kind_of(path):
    """The class of this path; the test is skipped where its library is not installed."""
    module, _, name = path.rpartition(".")
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    logging.disable(logging.ERROR)  # some say which kernels a CPU does without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(import_module(module), name)
    logging.disable(logging.NOTSET)
    return kind


class Block(nn.Module):
    """Matrices wide, high and square, biases, and a norm."""

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.mix(self.norm(x)))))


class Model(nn.Module):
    """Embedding, three blocks and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(Block(24, hidden) for hidden in (40, 48, 56))
        self.head = nn.Linear(24, 37)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TEMPLATE = Model()  # ranks are threads, and share torch's random numbers


def newton_schulz(grad, coefficients, steps, eps):
    """Muon's iterations in the dtype of the gradient: bf16 makes much of its last bits."""
    a, b, c = coefficients
    update = grad.mT if grad.size(0) > grad.size(1) else grad
    update = update / update.norm().clamp(min=eps)
    for _ in range(steps):
        gram = update @ update.mT
        update = a * update + (b * gram + c * gram @ gram) @ update
    return update.mT if grad.size(0) > grad.size(1) else update


def in_float64(monkeypatch):
    """Let the model be one in float64, and Muon iterate in it."""
    monkeypatch.setattr(sys.modules[__name__], "TEMPLATE", copy.deepcopy(TEMPLATE).double())
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", newton_schulz)


def is_for_muon(name):
    return name.startswith("blocks") and name.endswith("weight") and "norm" not in name


def muon_and_adamw(model, name_of=lambda name: name, muon=torch.optim.Muon):
    named = [(name_of(name), param) for name, param in model.named_parameters()]
    matrices = [param for name, param in named if is_for_muon(name)]
    others = [param for name, param in named if not is_for_muon(name)]
    assert len(matrices) == 9
    return [muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(others, lr=1e-3)]


def batch(step, rank, part=0):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randint(0, 37, (2, 7), generator=generator)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def added(lists):
    """Add lists of tensors in their order."""
    return [sum(column[1:], column[0]) for column in zip(*lists, strict=True)]


def alone(world, parts=1, make=muon_and_adamw, steps=STEPS, model=None, optimizers=None, row=None):
    """Train in one process, with gradients added as ranks do: within a row, then those of rows."""
    model = model or copy.deepcopy(TEMPLATE)
    optimizers, row = optimizers or make(model), row or world
    for step in range(steps):
        of_parts = []
        for part in range(parts):
            of_ranks = []
            for rank in range(world):
                model.zero_grad()
                loss_of(model, batch(step, rank, part)).backward()
                of_ranks.append([param.grad.clone() for param in model.parameters()])
            rows = [added(of_ranks[first : first + row]) for first in range(0, world, row)]
            of_parts.append([total / world for total in added(rows)])
        for param, grad in zip(model.parameters(), added(of_parts), strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return params_of(model)


def sharded(comm, align="matrix", **options):
    model = copy.deepcopy(TEMPLATE)
    for block in model.blocks:
        fs.fully_shard(block, mesh=comm, align=align, **options)
    return fs.fully_shard(model, mesh=comm, **options)


def wrapped(comm, align="matrix", **options):
    return shard(
        copy.deepcopy(TEMPLATE), comm, "wrapper", [Block], align=align, use_orig_params=True,
        **options,
    )  # fmt: skip


DOORS = {"fully_shard": sharded, "wrapper": wrapped}


class Counted:
    """The collectives of ranks that are threads, counted while a rank is `inside`."""

    def __init__(self, monkeypatch):
        self.inside = threading.local()
        self.calls = []
        issue = LocalComm._issue

        def counting(comm, name, label, *rest):
            if getattr(self.inside, "now", False):
                self.calls.append((name, label))
            return issue(comm, name, label, *rest)

        monkeypatch.setattr(LocalComm, "_issue", counting)

    def step(self, optimizers):
        self.inside.now = True
        for optimizer in optimizers:
            optimizer.step()
        self.inside.now = False


def train(model, optimizers, rank, parts=1, steps=range(STEPS), step_by=None):
    for step in steps:
        for part in range(parts):
            loss_of(model, batch(step, rank, part)).backward()
        if step_by is None:
            for optimizer in optimizers:
                optimizer.step()
        else:
            step_by(optimizers)
        for optimizer in optimizers:
            optimizer.zero_grad()


def full(model):
    return {name.replace("_fsdp_wrapped_module.", ""): x for name, x in params_of(model).items()}


def assert_equal(values, expected):
    assert values.keys() == expected.keys()
    for name, value in values.items():
        if is_for_muon(name):
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


def assert_equal_in_float64(values, expected):
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12, msg=name)
