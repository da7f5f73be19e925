# SPDX-License-Identifier: Apache-2.0
"""Random models under random optimizers, groups and schedules train as in one process.

Half way they go on with other ranks, in another layout, or from their state dicts. A failure's seed
reproduces it; ``FULLSHARD_TRIALS=full`` takes 400.
"""

import copy
import random
from pathlib import Path

import pytest
import torch
from support.owned_matrices import newton_schulz
from support.random_training import WORLDS, Net, Optimizers, drawn_way, train
from support.sampling import FULL
from torch.optim import _muon
from torch.utils._pytree import tree_map

import fullshard.torch as fs
from fullshard.core import layout
from fullshard.testing import LocalWorld

SEEDS = range(400 if FULL else 5)
STEPS = 4


def whole(values):
    """Return what may be sharded with whole tensors in its place, and none of its memory."""
    return tree_map(
        lambda x: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
        if isinstance(x, torch.Tensor) else x,
        values,
    )  # fmt: skip


def saved_by_hand(model, optimizers):
    """Return state dicts as one process has them."""
    model = {name.replace("_fsdp_wrapped_module.", ""): x for name, x in model.named_parameters()}
    return whole(model), [whole(each.state_dict()) for each in optimizers]


def go_on(model, made, middle, start):
    """Load what was saved in ``middle``: a folder, or state dicts."""
    optimizers, schedulers = made
    if isinstance(middle, Path):
        fs.load_checkpoint(middle, model, dict(zip("ab", optimizers, strict=False)))
    else:
        values, states = copy.deepcopy(middle)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(values[name.replace("_fsdp_wrapped_module.", "")])
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    for each in schedulers:
        each.last_epoch = start


@pytest.mark.parametrize("seed", SEEDS)
def test_random_training(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", newton_schulz)
    monkeypatch.setattr(layout, "PACKED_BYTES", (0, 400, 2**15)[seed % 3])
    choose = random.Random(seed)
    torch.manual_seed(seed)
    start = Net(choose).double()
    options = {
        "parts": choose.randint(1, 2),
        "max_norm": choose.choice([None, 0.1]),
        "without": choose.choice([None, None, choose.randrange(100)]),
    }
    expected = copy.deepcopy(start)
    train(expected, Optimizers(seed).make(expected), range(STEPS), **options)

    middle = None
    by_hand = choose.random() < 0.5
    for steps in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        world = choose.choice(WORLDS)
        plain = by_hand and choose.random() < 0.2
        way = drawn_way(choose, world, start)

        def body(comm, way=way, steps=steps, middle=middle, plain=plain):
            model = copy.deepcopy(start)
            if not plain:
                model = way.shard(comm, model)
            made = Optimizers(seed, exchanged=not plain).make(model)
            if middle is not None:
                go_on(model, made, middle, steps.start)
            train(model, made, steps, comm.rank, comm.size, **options)
            saved = saved_by_hand(model, made[0])
            if not by_hand and middle is None:
                fs.save_checkpoint(
                    tmp_path / "run", model, dict(zip("ab", made[0], strict=False)), step=2
                )
            return saved

        found = LocalWorld(1 if plain else world).run(body)
        middle = found[-1] if by_hand else tmp_path / "run"
    for values, _ in found:
        for name, param in expected.named_parameters():
            torch.testing.assert_close(values[name], param.detach(), rtol=1e-7, atol=1e-9, msg=name)
