# SPDX-License-Identifier: Apache-2.0
"""Blocks under autocast are told to keep what they keep on a CPU, to the byte."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.core.strategy import Precision
from fullshard.plan import Recompute, Run, cluster_of, named_device, named_model, predict
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.command.recipe import code_of
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import LLAMA, Shape

WIDTH, HIDDEN, TOKENS, HEADS, KV_HEADS = 64, 160, 128, 4, 2
HEAD = WIDTH // HEADS
MODEL, CLUSTER = named_model("llama2-7b"), cluster_of(named_device("a100-80"), 8)
AMP = Run(precision=Precision(), autocast="bfloat16", fused_norms=False)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class Block(nn.Module):
    """A block of transformers' Llama, without rotary positions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = RMSNorm(), RMSNorm()
        for name, into, out in (
            ("q", WIDTH, WIDTH),
            ("k", WIDTH, KV_HEADS * HEAD),
            ("v", WIDTH, KV_HEADS * HEAD),
            ("o", WIDTH, WIDTH),
            ("gate", WIDTH, HIDDEN),
            ("up", WIDTH, HIDDEN),
            ("down", HIDDEN, WIDTH),
        ):
            setattr(self, name, nn.Linear(into, out, bias=False))

    def forward(self, hidden):
        normed = self.first(hidden)
        heads = [
            each(normed).view(1, TOKENS, -1, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        hidden = hidden + self.o(seen.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        normed = self.second(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def saved_bytes():
    """Bytes of all storages that forward under autocast saves, parameters apart."""
    block, storages = Block(), {}
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    own = {each.untyped_storage()._cdata for each in block.parameters()}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        block(hidden)
    return sum(each.untyped_storage().nbytes() for key, each in storages.items() if key not in own)


def test_a_block_under_autocast_keeps_its_casts():
    shape = Shape(1, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, 256, TOKENS, rotary=False, naming=LLAMA)
    calls = Decoder("block", shape).calls(AMP)
    told = sum(each.saved_bytes for each in calls[1].operations)
    roots = 2 * 4 * TOKENS  # of the mean squares: one a token and norm, which is left out
    assert told == saved_bytes() - roots


def test_the_recipe_says_where_autocast_belongs():
    run = with_setting(Setup(Run(micro_batch=1), CLUSTER), "precision", "bf16-amp").run
    code = code_of(predict(MODEL, run, CLUSTER))
    assert '# forward within torch.autocast("cuda", torch.bfloat16)' in code
    assert "MixedPrecision" not in code


@pytest.mark.parametrize(
    ("recompute", "offloads"),
    [(Recompute.FULL, False), (Recompute.SELECTIVE, False), (Recompute.FULL, True)],
)
def test_a_cache_of_keys_and_values_is_kept_by_recomputed_blocks(recompute, offloads):
    run = Run(micro_batch=4, recompute=recompute, offload_activations=offloads)
    without, cached = (
        predict(MODEL, replace(run, use_cache=each), CLUSTER).memory for each in (False, True)
    )
    keys_and_values = 2 * 32 * 4 * 4096 * 4096 * 2
    assert cached.allocated_bytes - without.allocated_bytes == keys_and_values
