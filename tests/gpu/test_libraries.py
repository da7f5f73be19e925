# SPDX-License-Identifier: Apache-2.0
"""Models of transformers and PEFT in bf16, as people train them, beside the same without shards.

One rank over NCCL computes in bf16 from masters in fp32, so that it gathers and frees like many.
"""

from itertools import product

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from gpu.stream_world import LateCopies, poison_buffers
from gpu.training import cases
from support.models import seeded
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fullshard.torch import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    fully_shard,
    overlap_optimizer,
)
from fullshard.torch.step.managed import managed_units
from fullshard.wrap import ModuleWrapPolicy

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own are not ours to mend
WORDS, LENGTH, STEPS = 256, 64, 4


def llama(device, attention="sdpa"):
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    return seeded(lambda: transformers.LlamaForCausalLM(config)).to(device)


def adapted(device):
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    model = llama(device)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return seeded(lambda: peft.get_peft_model(model, config)).to(device)


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def trained(model, device, prepare=None, clip=True, scaler=None):
    """Losses of some steps on the same tokens."""
    tokens = torch.arange(4 * LENGTH, device=device).view(4, LENGTH) * 7 % WORDS
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=3e-3, fused=True)
    if prepare is not None:
        prepare(model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses).tolist()


def by_function(model, low=torch.bfloat16, **options):
    policy = MixedPrecisionPolicy(low, low)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def by_wrapper(model, low=torch.bfloat16, **options):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        mixed_precision=MixedPrecision(low, low),
        use_orig_params=True,
        **options,
    )


def checkpointing(model):
    enable = getattr(model, "activation_checkpointing_enable", None)  # the name from 5.20 on
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


WAYS = {
    "function": by_function,
    "checkpointing": lambda model: by_function(checkpointing(model)),
    "checkpointing, offload": lambda model: by_function(
        checkpointing(model), offload_policy=CPUOffloadPolicy()
    ),
    "wrapper, SHARD_GRAD_OP": lambda model: by_wrapper(
        checkpointing(model), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "kept after forward": lambda model: by_function(model, reshard_after_forward=False),
}


def as_one_process(model, device, low=torch.bfloat16):
    """fp32 masters by autocast: other casts than ours, so losses are near, not equal."""
    forward = model.forward

    def cast(*args, **kwargs):
        with torch.autocast(device.type, dtype=low):
            return forward(*args, **kwargs)

    model.forward = cast
    return trained(model, device)


@pytest.mark.parametrize(
    ("device", "way", "adapters"),
    cases(*product(WAYS, (False, True)), also_on_cpu=[("checkpointing, offload", True)]),
    indirect=["device"],
)
def test_llama_in_bf16(way, adapters, one_rank, device, monkeypatch):
    make = adapted if adapters else llama
    expected = as_one_process(make(device), device)
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    model = WAYS[way](make(device))
    assert not any(managed.unit.resident for managed in managed_units(model))
    found = trained(model, device)
    assert found == pytest.approx(expected, rel=2e-2)
    assert expected[-1] < expected[0] - 0.01  # it learns, so that weights count


@pytest.mark.parametrize(
    ("device", "beside", "offload"),
    cases(*product(("backward", "forward"), (False, True))),
    indirect=["device"],
)
def test_llama_with_steps_beside(beside, offload, one_rank, device, monkeypatch):
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    expected = trained(by_function(checkpointing(llama(device)), **options), device, clip=False)
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    found = trained(
        by_function(checkpointing(llama(device)), **options),
        device,
        lambda model, optimizer: overlap_optimizer(model, optimizer, beside=beside),
        clip=False,
    )
    # Attention's backward adds up in any order on a GPU.
    assert found == pytest.approx(expected, rel=1e-3 if device.type == "cuda" else 0)


SCALERS = torch.amp.GradScaler, ShardedGradScaler


@pytest.mark.parametrize(("device", "scaler_class"), cases(*SCALERS), indirect=["device"])
def test_llama_in_fp16_with_a_scaler(scaler_class, one_rank, device):
    expected = as_one_process(llama(device), device)
    found = trained(
        by_function(checkpointing(llama(device)), torch.float16),
        device,
        scaler=scaler_class(device.type, init_scale=2.0**10),
    )
    assert found == pytest.approx(expected, rel=2e-2)


def test_llama_generates(one_rank, device):
    """Greedily, from a cache of keys, in bf16: forwards of changing sizes, without gradients."""
    prompt = torch.arange(8, device=device).view(1, 8)
    plain = llama(device).to(torch.bfloat16)
    model = by_function(llama(device))
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        expected = plain.generate(prompt, **words)
        found = model.generate(prompt, **words)
    assert expected.shape == (1, 20)
    # Near ties may fall otherwise, and then all that follows does.
    assert (found == expected).float().mean() > 0.6
