# SPDX-License-Identifier: Apache-2.0
"""Blocks under autocast are told to keep what they keep on a CPU, to the byte."""

from dataclasses import replace

import pytest
import torch
from support.llama_block import (
    HEAD,
    HEADS,
    HIDDEN,
    KV_HEADS,
    TOKENS,
    WIDTH,
    Block,
    saved_bytes,
)

from fullshard.core.strategy import Precision
from fullshard.plan import (
    AttentionKernel,
    Loss,
    Recompute,
    Run,
    cluster_of,
    named_device,
    named_model,
    predict,
)
from fullshard.plan.choose.settings import Setup, with_setting
from fullshard.plan.command.recipe import code_of
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import NAMINGS, Norm, Shape

MODEL, CLUSTER = named_model("llama2-7b"), cluster_of(named_device("a100-80"), 8)
AMP = Run(precision=Precision(), autocast="bfloat16", fused_norms=False)


def test_a_block_under_autocast_keeps_its_casts():
    shape = Shape(
        1, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, 256, TOKENS, rotary=False, naming=NAMINGS["LLAMA"]
    )
    calls = Decoder("block", shape).calls(AMP)
    told = sum(each.saved_bytes for each in calls[1].operations)
    roots = 2 * 4 * TOKENS  # of the mean squares: one a token and norm, which is left out
    block, hidden = Block(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        kept = saved_bytes(lambda: block(hidden), block.parameters())
    assert told == kept - roots


def test_a_block_in_16_bits_keeps_copies_of_what_norms_read_and_not_that_itself():
    shape = Shape(
        1, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, 256, TOKENS, rotary=False, naming=NAMINGS["LLAMA"]
    )
    run = Run(precision=Precision(), param_dtype="bfloat16", fused_norms=False)
    told = sum(each.saved_bytes for each in Decoder("block", shape).calls(run)[1].operations)
    block = Block().bfloat16()
    hidden = torch.randn(1, TOKENS, WIDTH).bfloat16().requires_grad_()
    roots = 2 * 4 * TOKENS
    assert told == saved_bytes(lambda: block(hidden), block.parameters()) - roots


class PowersBlock(torch.nn.Module):
    """A block of GPT-2's, with the casts that autocast makes on a GPU around norms and powers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        for name, into, out in (
            ("joint", WIDTH, 3 * WIDTH),
            ("out", WIDTH, WIDTH),
            ("up", WIDTH, 4 * WIDTH),
            ("down", 4 * WIDTH, WIDTH),
        ):
            setattr(self, name, torch.nn.Linear(into, out, dtype=torch.bfloat16))

    def forward(self, hidden):
        joint = self.joint(self.first(hidden.float()).bfloat16())
        query, key, value = joint.view(1, TOKENS, HEADS, 3 * HEAD).transpose(1, 2).chunk(3, -1)
        scores = (query @ key.transpose(-2, -1)).float().softmax(-1)
        scores = torch.native_dropout(scores, 0.1, True)[0].bfloat16()
        seen = self.out((scores @ value).transpose(1, 2).reshape(1, TOKENS, WIDTH))
        hidden = hidden + torch.native_dropout(seen, 0.1, True)[0]
        inner = self.up(self.second(hidden.float()).bfloat16())
        wide = inner.float()
        wide = 0.5 * inner * (1 + torch.tanh(0.8 * (wide + 0.04 * wide.pow(3))))
        return hidden + torch.native_dropout(self.down(wide.bfloat16()), 0.1, True)[0]


def test_powers_and_scores_under_autocast_are_kept_in_float32():
    block, hidden = PowersBlock(), torch.randn(1, TOKENS, WIDTH).bfloat16().requires_grad_()
    kept = saved_bytes(lambda: block(hidden), block.parameters())
    half = Precision(compute="bfloat16", reduce="bfloat16")
    run = replace(AMP, precision=half, attention=AttentionKernel.EAGER)
    shape = {"rotary": False, "gated": False, "dropout": True, "gelu_parts": 3}
    shape |= {"norm": Norm.LAYER, "naming": NAMINGS["GPT2"]}
    sizes = (1, WIDTH, HEADS, HEADS, HEAD, 4 * WIDTH, 256, TOKENS)
    told = sum(
        each.saved_bytes for each in Decoder("", Shape(*sizes, **shape)).calls(run)[1].operations
    )
    assert told == pytest.approx(kept, rel=0.005)


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
    run = Run(micro_batch=8, recompute=recompute, offload_activations=offloads, loss=Loss.FREED)
    without, cached = (
        predict(MODEL, replace(run, use_cache=each), CLUSTER).memory for each in (False, True)
    )
    keys_and_values = 2 * 32 * 8 * 4096 * 4096 * 2
    assert cached.allocated_bytes - without.allocated_bytes == keys_and_values
