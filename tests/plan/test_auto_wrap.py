# SPDX-License-Identifier: Apache-2.0
"""``auto_wrap_policy="auto"``: units of a size that fits the link, the same on every rank."""

import copy

import pytest
import torch
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS
from fullshard.core.spec import ParamSpec
from fullshard.plan import cluster_of, named_device
from fullshard.plan.choose.wrapping import MOST_LATENCY, choose_wrapping, weigh
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel
from fullshard.torch.sharding import auto_wrap
from fullshard.train.torch.models import GPT
from fullshard.wrap import modules_to_wrap

H100 = named_device("h100")
BLOCKS = [f"blocks.{n}" for n in range(8)]


def model(numel):
    return [ParamSpec(f"{block}.weight", (numel,)) for block in BLOCKS]


def test_units_by_block_hold_less_and_wait_more_often():
    cluster = cluster_of(H100, 64)
    by_block, alone = weigh(model(2**27), BLOCKS, cluster), weigh(model(2**27), [], cluster)
    assert by_block.peak_bytes < 0.5 * alone.peak_bytes
    assert by_block.gather_s > alone.gather_s


def test_large_blocks_become_units_and_small_ones_do_not():
    cluster = cluster_of(H100, 64)
    large = choose_wrapping(model(2**27), [BLOCKS, []], cluster)
    small = choose_wrapping(model(2**12), [BLOCKS, []], cluster)
    assert large.paths == tuple(BLOCKS)
    assert large.latency_share <= MOST_LATENCY
    assert small.paths == ()
    with pytest.raises(ConfigurationError, match="no candidate"):
        choose_wrapping(model(8), [], cluster)


def chosen(name, world, monkeypatch):
    with torch.device("meta"):
        gpt = GPT(TRANSFORMERS[name])
    monkeypatch.setattr(auto_wrap, "_cluster", lambda _root: cluster_of(H100, world))
    paths = {module: path for path, module in gpt.named_modules()}
    return [paths[each] for each in modules_to_wrap(gpt, auto_wrap.auto_wrap_policy(gpt))]


def test_a_large_model_is_cut_finer_than_a_small_one(monkeypatch):
    large = chosen("llama3-8b", 64, monkeypatch)
    assert any(path.startswith("blocks.31") for path in large)
    assert chosen("nano", 64, monkeypatch) == []


def test_the_wrapper_takes_it_and_trains():
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))

    def body(comm):
        wrapped = FullyShardedDataParallel(
            copy.deepcopy(plain), process_group=comm, auto_wrap_policy="auto"
        )
        wrapped(torch.ones(2, 8)).sum().backward()
        return all(param.grad is not None for param in wrapped.parameters())

    assert LocalWorld(2).run(body) == [True, True]
