# SPDX-License-Identifier: Apache-2.0
"""Blocks with PEFT's adapters are told to keep what they keep on a CPU, to the byte."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from support.llama_block import HEAD, HEADS, HIDDEN, KV_HEADS, TOKENS, WIDTH, Block, saved_bytes

from fullshard.core.strategy import Precision
from fullshard.plan import Run, named_model
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import NAMINGS, Shape
from fullshard.plan.run import Adapted

RANK = 2
PURE = Run(
    precision=Precision(), param_dtype="bfloat16", fused_norms=False, lora_rank=RANK,
    lora_dtype="bfloat16",
)  # fmt: skip
SHAPE = Shape(
    1, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, 256, TOKENS, rotary=False, naming=NAMINGS["LLAMA"]
)


def adapted(run):
    """A block with adapters, as PEFT puts them there, and what of it is trained."""
    block = Block().bfloat16()
    on = {
        Adapted.ALL: ["q", "k", "v", "o", "gate", "up", "down"],
        Adapted.ATTENTION: ["q", "k", "v", "o"],
        Adapted.QUERY_VALUE: ["q", "v"],
    }[run.lora_on]
    block = inject_adapter_in_model(LoraConfig(r=RANK, target_modules=on), block)
    for name, each in block.named_parameters():
        if "lora" in name:
            each.data = each.data.to(getattr(torch, run.lora_dtype))
    return block


@pytest.mark.parametrize("on", list(Adapted))
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_block_keeps_what_its_adapters_read(on, autocast, dtype):
    """Those in float32 keep a copy each, of which autocast leaves 16 bits; frozen weights none."""
    run = replace(PURE, lora_on=on, lora_dtype=dtype, autocast=autocast)
    block, hidden = adapted(run), torch.randn(1, TOKENS, WIDTH).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        kept = saved_bytes(lambda: block(hidden), block.parameters())
    kept -= 2 * 4 * TOKENS  # of the mean squares: one a token and norm, which is left out
    if autocast and run.wide_adapters:  # so are casts of adapters themselves
        kept -= 2 * sum(each.numel() for each in block.parameters() if each.requires_grad)
    calls = Decoder("block", SHAPE).calls(run)
    assert sum(each.saved_bytes for each in calls[1].operations) == kept


def test_adapters_beside_queries_and_values_are_few():
    trained = {
        on: sum(
            each.numel
            for each in named_model("llama3-8b").spec(Run(lora_rank=8, lora_on=on))
            if each.trainable
        )
        for on in Adapted
    }
    assert trained[Adapted.QUERY_VALUE] == 32 * 8 * (2 * 4096 + 4096 + 1024)
    assert trained[Adapted.ATTENTION] == 32 * 8 * (2 * 8192 + 2 * (4096 + 1024))
