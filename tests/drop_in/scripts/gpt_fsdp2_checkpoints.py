# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with fully_shard, save it with distributed checkpoints and resume."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCABULARY, WIDTH, HEADS, LENGTH = 53, 32, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(-2, -3)
            for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()


def build(args, mesh, weights=None):
    """A sharded GPT; with ``weights`` (whole ones, on rank 0) it is filled from there."""
    with torch.device("meta"):
        model = GPT()
    options = {"mesh": mesh}
    if args.mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    if args.explicit_prefetching:
        for this, following in zip(model.blocks, model.blocks[1:], strict=False):
            this.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([this])
    model.to_empty(device="cpu")
    if weights is None:
        plain = GPT()
        torch.manual_seed(0)
        plain.init_weights()
        weights = plain.state_dict()
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=whole)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def train(model, optimizer, steps, rank):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
        tokens[:, 1::2] = tokens[:, :-1:2]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if rank == 0:
            print(f"step {step} loss {loss.item():.8f} norm {norm.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--explicit-prefetching", action="store_true")
    parser.add_argument("--checkpoint-dir", default="gpt-checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    model, optimizer = build(args, mesh)
    train(model, optimizer, range(6), rank)
    folder = os.path.join(args.checkpoint_dir, "step-6")
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    train(model, optimizer, range(6, 10), rank)

    resumed, optimizer = build(args, mesh)
    weights, states = get_state_dict(resumed, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        resumed,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train(resumed, optimizer, range(6, 10), rank)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(resumed, options=whole)
    again, optimizer = build(args, mesh, weights)
    train(again, optimizer, range(10, 12), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
