# SPDX-License-Identifier: Apache-2.0
"""A transformer under fully_shard whose checkpoints are gathered and cut by the script itself."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

VOCABULARY, WIDTH, HEADS, LENGTH = 47, 24, 3, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH))

    def forward(self, x):
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.ff(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)

    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()


def gathered(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def save(model, optimizer, folder):
    weights = {}
    for name, sharded in model.state_dict().items():
        full = gathered(sharded)
        if dist.get_rank() == 0:
            weights[name] = full.cpu()
    names = [name for name, _ in model.named_parameters()]
    states = {}
    for number, state in optimizer.state_dict()["state"].items():
        full = {key: gathered(value) for key, value in state.items()}
        if dist.get_rank() == 0:
            states[names[number]] = {key: value.cpu() for key, value in full.items()}
    if dist.get_rank() == 0:
        torch.save(weights, os.path.join(folder, "model.pt"))
        torch.save(states, os.path.join(folder, "optimizer.pt"))
    dist.barrier()


def cut_like(full, sharded):
    if isinstance(sharded, DTensor):
        return distribute_tensor(full, sharded.device_mesh, sharded.placements)
    return full


def load_model(model, folder):
    path = os.path.join(folder, "model.pt")
    weights = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    empty = model.state_dict()
    cut = {name: nn.Parameter(cut_like(weights[name], empty[name])) for name in empty}
    model.load_state_dict(cut, strict=False, assign=True)


def load_optimizer(model, optimizer, folder):
    path = os.path.join(folder, "optimizer.pt")
    saved = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    _init_optim_state(optimizer)
    whole = optimizer.state_dict()
    for number, (name, _) in enumerate(model.named_parameters()):
        whole["state"][number] = {
            key: cut_like(saved[name][key], value) for key, value in whole["state"][number].items()
        }
    optimizer.load_state_dict(whole)


def build(args):
    with torch.device("meta"):
        model = Transformer()
    options = {}
    if args.mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, Transformer)
    assert isinstance(model, FSDPModule)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return model


def train(model, optimizer, steps, args):
    layers = list(model.layers)
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model.unshard(async_op=True)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
            (loss / 2).backward()
        for layer in layers:
            layer.reshard()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.8f} norm {gathered(norm).item():.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--checkpoint-dir", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build(args)
    plain = Transformer()
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), os.path.join(args.checkpoint_dir, "model.pt"))
    dist.barrier()
    load_model(model, args.checkpoint_dir)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train(model, optimizer, range(5), args)
    save(model, optimizer, args.checkpoint_dir)
    train(model, optimizer, range(5, 10), args)

    resumed = build(args)
    load_model(resumed, args.checkpoint_dir)
    optimizer = torch.optim.Adam(resumed.parameters(), lr=3e-3)
    load_optimizer(resumed, optimizer, args.checkpoint_dir)
    train(resumed, optimizer, range(5, 10), args)

    with torch.no_grad():
        resumed.to_empty(device="cpu")
        torch.manual_seed(1)
        resumed.reset_parameters()
    total = sum(gathered(p.detach()).double().abs().sum() for p in resumed.parameters())
    if dist.get_rank() == 0 and total.isfinite():
        print("initialised in place")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
