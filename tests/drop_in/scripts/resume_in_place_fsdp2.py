# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are read straight into the state dicts, which are the model and the optimizer.

Nothing is set afterwards: whatever is written to a state dict's DTensors is written to the run.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

WIDTH, CLASSES = 27, 6


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = nn.functional.rms_norm(x, (WIDTH,), self.scale)
        return x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(9, WIDTH)
        self.layers = nn.ModuleDict({str(number): Gated() for number in range(3)})
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.last(x)


def build(args, mesh, seed):
    with torch.device("meta"):
        model = Net()
    half = args.mixed_precision
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device="cpu")
    fill(model, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


@torch.no_grad()
def fill(model, seed):
    """Every element by its place, through the state dict."""
    for number, (name, value) in enumerate(model.state_dict().items()):
        assert isinstance(value, DTensor), name
        if "scale" in name:
            value.fill_(1.0)
            continue
        random = torch.Generator().manual_seed(100 * seed + number)
        drawn = torch.randn(value.shape, generator=random) / value.shape[-1] ** 0.5
        value.copy_(torch.distributed.tensor.distribute_tensor(drawn, value.device_mesh))


def look(model):
    """Statistics that are the same for any number of ranks."""
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter.full_tensor(), parameter.detach().full_tensor())
        deviation, mean = parameter.detach().std(), parameter.detach().mean()
        assert isinstance(deviation, DTensor), type(deviation)
        print(f"{name} {same} norm {whole(deviation):.6f} norm {whole(mean.abs()):.6f}")


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()


def train(parts, steps):
    model, optimizer, schedule = parts
    for step in steps:
        random = torch.Generator().manual_seed(5 * step + dist.get_rank())
        x = torch.randn(12, 9, generator=random)
        loss = nn.functional.cross_entropy(model(x).float(), (x[:, :CLASSES]).argmax(1))
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.8f} norm {norm:.6f}", flush=True)


def load(parts, folder):
    model, optimizer, schedule = parts
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states, "schedule": schedule.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    schedule.load_state_dict(state["schedule"])
    follow(parts)


def follow(parts):
    """Let the optimizer have the rate that the schedule is at."""
    _, optimizer, schedule = parts
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--in-background", action="store_true")
    parser.add_argument("--checkpoint-dir", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    background = dist.new_group()  # for the thread that saves while others train
    folder = Path(args.checkpoint_dir)

    parts = build(args, mesh, seed=0)
    look(parts[0])
    train(parts, range(5))
    weights, states = get_state_dict(*parts[:2])
    state = {"model": weights, "optim": states, "schedule": parts[2].state_dict()}
    if args.in_background:
        saving = dcp.async_save(state, checkpoint_id=folder / "5", process_group=background)
        train(parts, range(5, 6))
        saving.result()
        train(parts, range(6, 9))
    else:
        dcp.save(state, checkpoint_id=folder / "5")
        train(parts, range(5, 9))

    parts = build(args, mesh, seed=1)
    load(parts, folder / "5")
    train(parts, range(5, 9))
    load(parts, folder / "5")  # over a model that has gathered, and an optimizer that has stepped
    train(parts, range(5, 9))

    # the model and the optimizer in folders of their own
    dcp.save(get_model_state_dict(parts[0]), checkpoint_id=folder / "weights")
    dcp.save(get_optimizer_state_dict(*parts[:2]), checkpoint_id=folder / "states")
    train(parts, range(9, 11))
    parts = build(args, mesh, seed=2)
    states = get_optimizer_state_dict(*parts[:2])
    dcp.load(states, checkpoint_id=folder / "states")
    dcp.load(get_model_state_dict(parts[0]), checkpoint_id=folder / "weights")
    for _ in range(9):
        parts[2].step()
    train(parts, range(9, 11))

    with torch.no_grad():  # writes between steps are seen by the next
        weights = parts[0].state_dict()
        weights["last.bias"].fill_(0.25)
        weights["last.weight"].copy_(weights["last.weight"] * 0.5)
        weights["layers.1.w2.weight"].mul_(2.0)
        weights["layers.0.w1.weight"].to_local().zero_()
        parts[0].state_dict()["first.bias"].zero_()
    look(parts[0])
    train(parts, range(11, 13))
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder / "weights", folder / "whole.pt")
        for name, value in torch.load(folder / "whole.pt", weights_only=True).items():
            print(name, tuple(value.shape), f"norm {value.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
