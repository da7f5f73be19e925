# SPDX-License-Identifier: Apache-2.0
"""Train a transformer that is built on meta, look at its parameters, save it in three ways.

The ways are the state-dict functions of torch.distributed.checkpoint, with whole tensors on rank
0, distributed checkpoints, and DTensors that are gathered one by one and cut by hand.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

VOCABULARY, WIDTH, HEADS, LENGTH, LAYERS = 41, 32, 4, 12, 2


class Layer(nn.Module):
    def __init__(self, mixed):
        super().__init__()
        self.mixed = mixed
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH + 1), nn.Linear(3 * WIDTH + 1, WIDTH)

    def forward(self, x):
        computed_in = torch.bfloat16 if self.mixed else torch.float32
        assert {p.dtype for p in self.parameters()} == {computed_in}
        assert not any(isinstance(p, DTensor) for p in self.parameters())
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    def reset_parameters(self):
        self.attend._reset_parameters()
        for module in (*self.norms, self.up, self.down, self.attend.out_proj):
            module.reset_parameters()


class Model(nn.Module):
    def __init__(self, mixed):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer(mixed) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm(x))

    def reset_parameters(self):
        for module in (self.tokens, self.places, *self.layers, self.norm, self.logits):
            module.reset_parameters()


def build(args):
    with torch.device("meta"):
        model = Model(args.mixed_precision)
    options = {}
    if args.mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, Model)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.dtype == torch.float32
        assert parameter.is_meta
    if args.explicit_prefetching:
        layers = list(model.layers)
        for number, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 3])
            layer.set_modules_to_backward_prefetch(layers[max(number - 2, 0) : number][::-1])
    return model


def describe(model):
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        assert local.dim() == parameter.dim()
        print(
            name, tuple(parameter.shape), parameter.stride(), parameter.placements,
            parameter.device_mesh, tuple(local.shape), local.stride(), parameter.requires_grad,
        )  # fmt: skip


def initialise(model):
    """The same weights in any engine: drawn in whole, then dealt out."""
    model.to_empty(device="cpu")
    model.reset_parameters()  # by every rank for its own part
    torch.manual_seed(7)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape) / max(parameter.shape) ** 0.5
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(part)


class ByStateDictFunctions:
    """Whole tensors in a file of rank 0, handed out by `set_model_state_dict`."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optimizer):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        states = get_optimizer_state_dict(model, optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save(weights, self.folder / "model.pt")
            torch.save(states, self.folder / "optimizer.pt")
        dist.barrier()

    def load_model(self, model):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        model.to_empty(device="cpu")
        set_model_state_dict(model, self._read("model.pt"), options=options)

    def load_optimizer(self, model, optimizer):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        states = self._read("optimizer.pt")
        set_optimizer_state_dict(model, optimizer, optim_state_dict=states, options=options)

    def _read(self, name):
        if dist.get_rank():
            return {}
        return torch.load(self.folder / name, weights_only=True, mmap=True)


class ByDistributedCheckpoints:
    """Each rank's rows in a file of its own, read into the state dicts and set from there."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optimizer):
        dcp.save(self._state(model, optimizer), checkpoint_id=self.folder)

    def load_model(self, model):
        initialise(model)

    def load_optimizer(self, model, optimizer):
        state = self._state(model, optimizer)
        dcp.load(state, checkpoint_id=self.folder)
        weights, states = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    def _state(self, model, optimizer):
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states}


class ByHand:
    """Whole tensors in a file of rank 0, by DTensors' own methods only."""

    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optimizer):
        weights = {name: whole(value) for name, value in model.state_dict().items()}
        states = optimizer.state_dict()
        numbered = {
            number: {key: whole(value) for key, value in state.items()}
            for number, state in states["state"].items()
        }
        if dist.get_rank() == 0:
            torch.save(weights, self.folder / "model.pt")
            groups = {"param_groups": states["param_groups"], "state": numbered}
            torch.save(groups, self.folder / "optimizer.pt")
        dist.barrier()

    def load_model(self, model):
        full = torch.load(self.folder / "model.pt", weights_only=True, mmap=True)
        sharded = {}
        for name, empty in model.state_dict().items():
            cut = distribute_tensor(full[name], empty.device_mesh, empty.placements)
            sharded[name] = nn.Parameter(cut)
        model.load_state_dict(sharded, strict=False, assign=True)

    def load_optimizer(self, model, optimizer):
        full = torch.load(self.folder / "optimizer.pt", weights_only=True, mmap=True)
        _init_optim_state(optimizer)
        mine = optimizer.state_dict()
        for number, state in mine["state"].items():
            for key, value in state.items():
                saved = full["state"][number][key]
                if isinstance(value, DTensor):
                    saved = distribute_tensor(saved, value.device_mesh, value.placements)
                state[key] = saved
        optimizer.load_state_dict({"state": mine["state"], "param_groups": full["param_groups"]})


def whole(value):
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def train(model, optimizer, steps, args):
    for step in steps:
        generator = torch.Generator().manual_seed(3 * step + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH), generator=generator)
        if args.explicit_prefetching:
            model.unshard(async_op=args.accumulate)
        parts = tokens.chunk(2 if args.accumulate else 1)
        for number, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(number == len(parts))
            logits = model(part)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), part.flatten())
            (loss / len(parts)).backward()
        if args.accumulate:
            for layer in model.layers:
                layer.reshard()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=args.accumulate or None)
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.placements == parameter.placements
            assert parameter.grad.dtype == parameter.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.8f} norm {whole(norm).item():.6f}", flush=True)


def new_folder(args, name):
    folder = Path(args.checkpoint_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--explicit-prefetching", action="store_true")
    parser.add_argument("--accumulate", action="store_true")
    parser.add_argument("--checkpoint-dir", default=".")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = build(args)
    initialise(model)
    describe(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train(model, optimizer, range(2), args)
    ways = (ByStateDictFunctions, ByDistributedCheckpoints, ByHand)
    turns = (*ways, ways[0])  # what one way has loaded the next one saves
    for step, kind in enumerate(turns, 2):
        way = kind(new_folder(args, f"{kind.__name__}-{step}"))
        way.save(model, optimizer)
        train(model, optimizer, [step], args)
        model = build(args)
        way.load_model(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        way.load_optimizer(model, optimizer)
        train(model, optimizer, [step], args)
    initialise(model)  # over weights that were trained
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train(model, optimizer, range(2), args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
