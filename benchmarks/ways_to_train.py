# SPDX-License-Identifier: Apache-2.0
"""Ways to train a model of transformers on one device, as trainers of all kinds write them.

Models are made on the device from the configurations in ``data/measured/models``, with random
weights and tokens. On a CPU they are tiny, to try the logic.
"""

import importlib
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

    ``precision`` is pure (bf16 throughout), amp (autocast over float32), pure amp (autocast over
    bf16), mixed (the engine casts) or fp32. ``attention`` is one of transformers' implementations,
    or sdpa with a backend of torch.
    ``mask`` is none, ones (as collators give it) or padded (some samples are shorter).
    ``loss`` is hf (transformers' own, of float32 logits), native (of 16-bit logits), chunked, kept
    (transformers' own, whose outputs are held until backward has ended), kept wide (the same, and
    logits handed out in float32, as Accelerate does under autocast) or policy (log-probabilities of
    tokens and entropies, as GRPO takes them, after those of a frozen model).
    ``loop`` is bare, or trainer: clip the gradients' norm, step a schedule, read the loss.
    ``lora`` is the rank of adapters; ``adapters`` says where and how: of all linear layers (all)
    or queries and values (qv), in the model's dtype (same) or float32 (wide, PEFT's default), and
    how much is dropped. ``liger`` replaces norms, rotations, gates and the loss by its kernels.
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
    adapters: str = "all same"
    liger: bool = False
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
    dtype = torch.bfloat16 if "pure" in case.precision else torch.float32
    asked = {"attn_implementation": case.attention.split()[0], "dtype": dtype}
    if case.experts:
        asked["experts_implementation"] = case.experts
    with device:
        model = AutoModelForCausalLM.from_config(config, **asked)
    model.train()
    if case.liger:
        liger = importlib.import_module("liger_kernel.transformers")
        liger._apply_liger_kernel_to_instance(model=model)
    if case.lora:
        model = with_adapters(model, case)
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


def with_adapters(model, case):
    targets, width, *dropped = case.adapters.split()
    config = LoraConfig(
        r=case.lora,
        target_modules={"all": "all-linear", "qv": ["q_proj", "v_proj"]}[targets],
        lora_dropout=float(dropped[0]) if dropped else 0.0,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=width == "wide")


def layers_of(model):
    return [each for each in model.modules() if type(each).__name__.endswith("DecoderLayer")]


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
        self.model, self.outputs = build(case, device), None
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
        if case.loss == "policy":
            return self.policy_loss(ids)
        if case.loss in ("hf", "kept", "kept wide"):
            outputs = self.model(input_ids=ids, attention_mask=self.mask, labels=ids)
            if case.loss == "kept wide":
                outputs.logits = outputs.logits.float()
            if case.loss != "hf":
                self.outputs = outputs
            return outputs.loss
        if case.loss == "native":
            logits = self.model(input_ids=ids, attention_mask=self.mask).logits
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        hidden = self.model.model(input_ids=ids, attention_mask=self.mask).last_hidden_state
        return chunked_loss(self.model.lm_head, hidden, ids)

    def policy_loss(self, ids):
        """Return minus the mean log-probability, beside that of the model without gradients."""
        with torch.no_grad():
            old, _ = chosen(self.model(input_ids=ids).logits, ids)
        logits = self.model(input_ids=ids).logits
        new, entropy = chosen(logits, ids)
        ratio = torch.exp(new - old)
        return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean() - 0.0 * entropy.mean()

    def step(self, mark=lambda name: None):
        amp = "amp" in self.case.precision
        for _ in range(self.case.accumulate):
            cast = torch.autocast(self.device.type, torch.bfloat16) if amp else nullcontext()
            with cast:
                loss = self.loss()
            mark("forward")
            loss.backward()
            self.outputs = None
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


def chosen(logits, ids):
    """Log-probabilities of the next tokens, row by row, and entropies without a gradient."""
    logits, labels = logits[:, :-1], ids[:, 1:, None]
    rows = zip(logits, labels, strict=True)
    picked = [F.log_softmax(row, -1).gather(-1, label).squeeze(-1) for row, label in rows]
    with torch.no_grad():
        pieces = [F.log_softmax(piece, -1) for piece in logits.flatten(0, 1).split(128)]
        entropy = torch.cat([-(each.exp() * each).sum(-1) for each in pieces])
    return torch.stack(picked), entropy


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
