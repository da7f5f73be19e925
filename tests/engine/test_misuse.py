# SPDX-License-Identifier: Apache-2.0
"""Random models, options and misuse: equal to one process, or an error of fullshard's own.

A sample of 500 seeds, which reaches each branch of the engine that they reach;
``FULLSHARD_TRIALS=full`` takes all.

By hand: ``FULLSHARD_FUZZ=300:10000 pytest tests/engine/test_misuse.py`` tries these seeds; those
from 10,000 on change modules at random moments, too, and those from 20,000 on draw layouts.
"""

import os
import random
import threading

import pytest
import torch
from support.beside import params_of
from support.misuse import SEED_OF_CHANGES, SEED_OF_LAYOUTS, Misuser
from support.random_models import build
from support.sampling import FULL

from fullshard.core.errors import FullshardError
from fullshard.testing import LocalWorld, LocalWorldError
from fullshard.torch import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    keep_for_double_backward,
    set_prefetch,
)

pytestmark = pytest.mark.usefixtures("checked_values")

STEPS = 3
FIRST, LAST = map(int, os.environ.get("FULLSHARD_FUZZ", "0:300").split(":"))
SEEDS_A_TEST = 10
RARE_WAYS = {
    *(30, 33, 35, 37, 40, 43, 58, 62, 79, 82, 94, 100, 103, 105, 113, 118, 127, 138, 148, 158),
    *(160, 163, 173, 178, 182, 186, 225, 228, 233, 251, 258, 260, 262, 266, 273, 283, 287, 290),
    *(292, 295, 10031, 10064, 10076, 10081, 20038, 20041, 20044, 20049, 20057, 20060, 20064),
    *(20068, 20074, 20089),
}


def shard(model, units, comm, choose, seed):
    options = {} if seed < SEED_OF_LAYOUTS else {"align": choose.choice(["row", "element"])}
    if choose.random() < 0.5:
        chosen = {model.get_submodule(name) for name in units}
        model = FullyShardedDataParallel(
            model,
            comm,
            choose.choice(list(ShardingStrategy)[:3]),
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in chosen,
            **options,
        )
    else:
        for name in sorted(units, key=lambda name: -name.count(".")):
            reshard = choose.choice([True, True, False])
            part = model.get_submodule(name)
            fully_shard(part, mesh=comm, reshard_after_forward=reshard, **options)
        model = fully_shard(model, mesh=comm, **options)
    set_prefetch(model, choose.randrange(3), choose.randrange(3))
    if choose.random() < 0.3:
        keep_for_double_backward(model)
    return model


def outcome(seed):
    """None if it is a right one; else what is wrong."""
    plain, _ = build(seed)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    refused = None
    try:
        Misuser(plain, random.Random(seed), seed).train(STEPS)
    except Exception as error:
        refused = error
    building = threading.Lock()

    def body(comm):
        with building:
            model, units = build(seed)
        model.load_state_dict(state)
        model = shard(model, units, comm, random.Random(seed + 1), seed)
        Misuser(model, random.Random(seed), seed).train(STEPS)
        return params_of(model)

    try:
        found = LocalWorld(1 + seed % 3, eager=seed % 5 == 0).run(body)
    except LocalWorldError as error:
        return f"ranks went apart: {error}"
    except FullshardError:
        return None
    except Exception as error:
        if refused is not None:
            return None
        return f"a raw {type(error).__name__}: {str(error)[:300]}"
    if refused is not None:
        return f"nothing was raised where one process raises {refused!r}"
    for each in found:
        for name, param in plain.named_parameters():
            if name not in each or not torch.allclose(each[name], param, rtol=1e-4, atol=1e-5):
                return f"{name} differs from one process"
    return None


SEEDS = [*range(FIRST, LAST)]
if "FULLSHARD_FUZZ" not in os.environ:
    SEEDS += [*range(SEED_OF_CHANGES, SEED_OF_CHANGES + 100)]
    SEEDS += [*range(SEED_OF_LAYOUTS, SEED_OF_LAYOUTS + 100)]
    SEEDS = SEEDS if FULL else [each for each in SEEDS if each % 10_000 < 3 or each in RARE_WAYS]


@pytest.mark.parametrize("first", range(0, len(SEEDS), SEEDS_A_TEST))
def test_misuse(first):
    wrong = {seed: outcome(seed) for seed in SEEDS[first : first + SEEDS_A_TEST]}
    assert not any(wrong.values()), {seed: text for seed, text in wrong.items() if text}


@pytest.mark.parametrize("seed", [527, 950, 995, 1372, 4687, 12763, 14845, 15413, 15562])
def test_misuse_that_once_went_wrong(seed):
    assert outcome(seed) is None
