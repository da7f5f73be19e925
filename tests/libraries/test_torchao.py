# SPDX-License-Identifier: Apache-2.0
"""torchao's optimizers with state in 8 bits step as over FSDP2."""

import logging
import warnings
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import seeded
from support.world import on_processes
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


pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


@on_processes(2, joined=True)
def test_8_bit_adamw_steps_as_over_fsdp2():
    losses, rows, kinds = steps(theirs.fully_shard)
    found, our_rows, our_kinds = steps(ours.fully_shard)
    assert found == pytest.approx(losses, rel=1e-6)
    assert found[-1] < found[0]
    torch.testing.assert_close(our_rows, rows, rtol=0, atol=1e-6)
    assert our_kinds == kinds
    assert {"OptimState8bit", "Tensor"} == set(kinds)


@on_processes(2, joined=True)
def test_state_in_blocks_is_loaded_by_torch_distributed_checkpoint(tmp_path):
    def step(model, optimizer):
        loss = model(torch.ones(8, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model, again = make(ours.fully_shard), make(ours.fully_shard)
    optimizer, fresh = adamw_8bit(model.parameters()), adamw_8bit(again.parameters())
    for _ in range(STEPS):
        step(model, optimizer)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    went_on = [step(model, optimizer) for _ in range(STEPS)]
    state = state_of(again, fresh)
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        again, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert [step(again, fresh) for _ in range(STEPS)] == went_on


@on_processes(2, joined=True)
def test_state_in_blocks_needs_rows():
    model = ours.FullyShardedDataParallel(seeded(net))
    optimizer = adamw_8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(NotSupportedError, match="sharded by element"):
        optimizer.step()
