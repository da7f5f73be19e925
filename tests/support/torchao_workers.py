# SPDX-License-Identifier: Apache-2.0
"""Steps of torchao's 8-bit AdamW over FSDP2 and over fullshard, on the ranks of a `World`."""

import logging
import warnings
from importlib import import_module

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import seeded
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from fullshard import torch as ours
from fullshard.core.errors import NotSupportedError

STEPS = 5


def net():
    """Rows of two ranks of 6,144 elements, of which state is in 8 bits, and smaller ones."""
    return nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64))


def make(door):
    model = seeded(net)
    for layer in (model[0], model[2]):
        door(layer)
    return door(model)


def adamw_8bit(params):
    logging.disable(logging.WARNING)  # it says which kernels a CPU does without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optim = import_module("torchao.optim")
    logging.disable(logging.NOTSET)
    return optim.AdamW8bit(params, lr=1e-2)


def steps(door):
    """(losses, this rank's rows of parameters, kinds of state)."""
    model = make(door)
    optimizer = adamw_8bit(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(8, 64, generator=generator)).square().mean()
        loss.backward()
        if door is theirs.fully_shard:
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        else:
            optimizer.step()
            assert torch._dynamo.eval_frame._stance.stance == "default"
        optimizer.zero_grad()
        losses.append(loss.item())
    kinds = []
    for param in model.parameters():
        state = optimizer.state[param]["exp_avg"]
        assert isinstance(state, DTensor)
        kinds.append(type(state.to_local()).__name__)
    rows = [param.to_local().detach().clone() for param in model.parameters()]
    return losses, rows, kinds


def both(group):
    """The same of FSDP2, then of fullshard."""
    return steps(theirs.fully_shard), steps(ours.fully_shard)


def loaded(group, folder):
    """Losses after some steps, going on and from a checkpoint of `torch.distributed.checkpoint`."""

    def step(model, optimizer):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model = make(ours.fully_shard)
    optimizer = adamw_8bit(model.parameters())
    for _ in range(STEPS):
        step(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    went_on = [step(model, optimizer) for _ in range(STEPS)]
    again = make(ours.fully_shard)
    fresh = adamw_8bit(again.parameters())
    state = state_of(again, fresh)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        again, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return went_on, [step(again, fresh) for _ in range(STEPS)]


def refusal(group):
    """What is said of a step over spans of elements."""
    model = ours.FullyShardedDataParallel(seeded(net))
    optimizer = adamw_8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    try:
        optimizer.step()
    except NotSupportedError as error:
        return str(error)
