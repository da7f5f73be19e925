# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model of transformers on one device, as trainers of all kinds write them.

Models are made on the device from the configurations in ``data/measured/models``, with random
weights and tokens. On a CPU they are tiny, to try the logic.
"""

import json
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import fullshard.torch as ours

MODELS = Path(__file__).parent / "data" / "measured" / "models"
TINY = {  # of each configuration, where logic is tried
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """One way to train a model; every field is a column of the row.

    ``precision`` is pure (bf16 throughout), amp (autocast over float32), mixed (the engine casts)
    or fp32. ``attention`` is one of transformers' implementations, or sdpa with a backend of torch.
    ``mask`` is none, ones (as collators give it) or padded (some samples are shorter).
    ``loss`` is hf (transformers' own, of float32 logits), native (of 16-bit logits) or chunked.
    ``loop`` is bare, or trainer: clip the gradients' norm, step a schedule, read the loss.
    """

    model: str
    sequence: int
    batch: int
    precision: str = "pure"
    recompute: str = "none"
    attention: str = "sdpa"
    mask: str = "none"
    loss: str = "hf"
    optimizer: str = "fused"
    engine: str = "plain"
    loop: str = "bare"
    accumulate: int = 1
    lora: int = 0
    compiled: str = ""
    cache: bool = False
    experts: str = ""
    profiled: bool = False


def config_of(case, tiny):
    told = json.loads((MODELS / f"{case.model}.json").read_text("utf-8"))
    if tiny:
        told |= {key: value for key, value in TINY.items() if key in told or key == "pad_token_id"}
    kind = told.pop("model_type")
    theta = told.pop("rope_theta")
    told["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if kind == "phi3":
        told["rope_parameters"]["partial_rotary_factor"] = 1.0
    config = CONFIG_MAPPING[kind](**told)
    config.use_cache = case.cache
    return config


def build(case, device):
    """The model on the device, and what is optimized."""
    config = config_of(case, tiny=device.type == "cpu")
    dtype = torch.bfloat16 if case.precision == "pure" else torch.float32
    asked = {"attn_implementation": case.attention.split()[0], "dtype": dtype}
    if case.experts:
        asked["experts_implementation"] = case.experts
    with device:
        model = AutoModelForCausalLM.from_config(config, **asked)
    model.train()
    if case.lora:
        model = with_adapters(model, case.lora)
    if case.recompute != "none":
        reentrant = "reentrant" in case.recompute
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if case.lora or reentrant:
            model.enable_input_require_grads()
    if case.compiled == "blocks":
        for layer in layers_of(model):
            layer.compile()
    elif case.compiled:
        model.compile()
    return sharded(model, case.engine)


def with_adapters(model, rank):
    config = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def layers_of(model):
    kinds = ("LlamaDecoderLayer", "Qwen3DecoderLayer", "Phi3DecoderLayer", "Qwen3MoeDecoderLayer")
    return [each for each in model.modules() if type(each).__name__ in kinds]


def sharded(model, engine):
    if engine == "plain":
        return model
    start_group(next(model.parameters()).device)
    library = torch_fsdp if engine.startswith("fsdp2") else ours
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mp_policy": policy}
    if "offload" in engine:
        options["offload_policy"] = library.CPUOffloadPolicy()
    for layer in layers_of(model):
        library.fully_shard(layer, **options)
    library.fully_shard(model, **options)
    return model


def start_group(device):
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cuda:nccl,cpu:gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def optimizer_of(case, params):
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=1e-5, foreach=True)
    ways = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "loop": {"foreach": False, "fused": False},
    }
    return torch.optim.AdamW(params, lr=1e-5, **ways[case.optimizer])


def attention_of(case):
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
    }
    told = case.attention.split()
    return sdpa_kernel(backends[told[1]]) if len(told) > 1 else nullcontext()


class Training:
    """A model in training; ``step`` is one step."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        sequence, batch = (64, 2) if device.type == "cpu" else (case.sequence, case.batch)
        self.model = build(case, device)
        self.params = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = optimizer_of(case, self.params)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        vocab = self.model.config.vocab_size
        self.ids = torch.randint(1, vocab, (batch, sequence), device=device)
        self.mask = None if case.mask == "none" else torch.ones_like(self.ids)
        if case.mask == "padded":
            self.mask[0, -sequence // 8 :] = 0

    def loss(self):
        case, ids = self.case, self.ids
        if case.loss == "hf":
            return self.model(input_ids=ids, attention_mask=self.mask, labels=ids).loss
        if case.loss == "native":
            logits = self.model(input_ids=ids, attention_mask=self.mask).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        hidden = self.model.model(input_ids=ids, attention_mask=self.mask).last_hidden_state
        return chunked_loss(self.model.lm_head, hidden, ids)

    def step(self, mark=lambda name: None):
        amp = self.case.precision == "amp"
        for _ in range(self.case.accumulate):
            cast = torch.autocast(self.device.type, torch.bfloat16) if amp else nullcontext()
            with cast:
                loss = self.loss()
            mark("forward")
            loss.backward()
            mark("backward")
        if self.case.loop == "trainer":
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            mark("clip")
        self.optimizer.step()
        if self.case.loop == "trainer":
            self.schedule.step()
            loss.item()
        self.optimizer.zero_grad()
        mark("optimizer")


def chunked_loss(head, hidden, ids):
    """Cross-entropy over eight pieces of the tokens, each computed again in backward."""

    def piece(states, labels):
        return F.cross_entropy(head(states).float(), labels, reduction="sum")

    states, labels = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    pieces = zip(states.chunk(8), labels.chunk(8), strict=True)
    losses = [
        torch.utils.checkpoint.checkpoint(piece, *each, use_reentrant=False) for each in pieces
    ]
    return torch.stack(losses).sum() / labels.numel()
