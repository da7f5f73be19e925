# SPDX-License-Identifier: Apache-2.0
"""Rank 0 alone has read the weights; the other ranks build on meta and are sent theirs."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

VOCABULARY, WIDTH, LENGTH = 37, 20, 9


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 45), nn.Linear(WIDTH, 45)
        self.down = nn.Linear(45, WIDTH)
        self.register_buffer("before", torch.ones(LENGTH, LENGTH).tril(), persistent=False)

    def forward(self, x):
        mixing = (self.mix.weight * self.before).to(x.dtype)
        x = x + mixing @ x
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class CausalModel(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(args):
    torch.manual_seed(11)
    with torch.device("meta") if dist.get_rank() else contextlib.nullcontext():
        model = CausalModel(args.tied)
    return model


def shard(model, args):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    options = {"mesh": mesh, "reshard_after_forward": True}
    if args.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, cast_forward_inputs=True
        )
    if args.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    full = model.state_dict()
    for module in list(model.modules()):
        own = isinstance(module, nn.Embedding) and not args.tied
        if own or isinstance(module, DecoderLayer):
            fully_shard(module, **options)
    fully_shard(model, **options)
    assert sum(isinstance(each, FSDPModule) for each in model.modules()) == 3 + (not args.tied)

    model = model.to("cpu") if dist.get_rank() == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=args.offload, broadcast_from_rank0=True
    )
    set_model_state_dict(model, full, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    return model


def clip(model, largest):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = _get_total_norm(gradients, 2.0, False, None)
    _clip_grads_with_norm_(model.parameters(), largest, norm, None)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def train(model, optimizer, steps):
    model.train()
    for step in steps:
        random = torch.Generator().manual_seed(step + 1000 * dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (6, LENGTH), generator=random)
        logits = model(tokens).float()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, :-1].flatten())
        loss.backward()
        norm = clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.8f} norm {norm.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--offload", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = shard(build(args), args)
    for name, parameter in model.named_parameters():
        print(name, parameter.placements, parameter.device, tuple(parameter.to_local().shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    train(model, optimizer, range(6))
    # weights for another engine, one at a time, then training goes on
    model = model.cpu()
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        print(name, tuple(full.shape), full.dtype, f"norm {full.norm().item():.4f}")
    model = model.to("cpu")
    train(model, optimizer, range(6, 9))
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(2 * LENGTH).view(2, LENGTH))
    model.reshard()
    print("evaluated", logits.dtype, f"norm {logits.float().norm().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
