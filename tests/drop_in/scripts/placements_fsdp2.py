# SPDX-License-Identifier: Apache-2.0
"""Parameters cut along the dimension that suits them, over a mesh of replicas or a plain one.

They are made on meta and filled module by module; then the modules are looked through for DTensors.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

WIDTH, CLASSES = 24, 7


class Experts(nn.Module):
    """Weights (experts, in, out) of which there may be fewer experts than ranks."""

    def __init__(self, count):
        super().__init__()
        self.choose = nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(count, 2 * WIDTH, WIDTH))

    def forward(self, x):
        shares = self.choose(x).softmax(-1)
        y = torch.einsum("bw,ewh->beh", x, self.up).relu()
        return x + torch.einsum("be,beh,ehw->bw", shares, y, self.down)

    def reset_parameters(self):
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -0.2, 0.2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(Experts(count) for count in (1, 3))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


def placement(parameter):
    if parameter.dim() < 2:
        return None
    largest = max(range(parameter.dim()), key=lambda dim: (parameter.shape[dim], -dim))
    return Shard(largest) if parameter.shape[largest] % 2 == 0 else Shard(0)


def fill_from_meta(model):
    """Make tensors of the parameters of each module that are on meta, then initialise it."""
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(each.is_meta for each in own):
            continue
        assert all(isinstance(each, DTensor) for each in own), name
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        assert isinstance(parameter, DTensor), name
        random = torch.Generator().manual_seed(number)
        drawn = 0.3 * torch.randn(parameter.shape, generator=random)
        full = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(full)


def describe(model):
    for name, value in model.state_dict().items():
        everywhere = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        again = DTensor.from_local(
            value.to_local(), value.device_mesh, value.placements,
            shape=value.shape, stride=value.stride(),
        )  # fmt: skip
        same = torch.equal(again.full_tensor(), everywhere.to_local())
        print(
            name, value.placements, tuple(value.shape), tuple(value.to_local().shape),
            value.device_mesh.mesh_dim_names, tuple(value.device_mesh.shape), same,
            f"norm {everywhere.to_local().norm().item():.6f}",
        )  # fmt: skip


def train(model, optimizer, steps, clip=True):
    for step in steps:
        random = torch.Generator().manual_seed(step + 500 * dist.get_rank())
        x = torch.randn(16, 10, generator=random)
        loss = nn.functional.cross_entropy(model(x), x[:, :CLASSES].argmax(1))
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad.placements == parameter.placements
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
        if clip:
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        print(f"step {step} loss {loss.item():.8f} norm {norm.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="2")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--optimizer", default="AdamW")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = tuple(map(int, args.mesh.split("x")))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with torch.device("meta"):
        model = Net()
    options = {"mesh": mesh, "shard_placement_fn": None if args.rows else placement}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    fill_from_meta(model)
    describe(model)
    if args.optimizer == "Muon":
        # DTensor does not write to matrices of fewer rows than there are ranks.
        matrices = [each for each in model.parameters() if each.dim() == 2 and each.shape[0] > 1]
        optimizer = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    else:
        optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-2)
    train(model, optimizer, range(6))
    for state in optimizer.state.values():
        for key, value in state.items():
            if value.dim():
                print(key, tuple(value.shape), value.placements, tuple(value.to_local().shape))
    describe(model)
    if args.optimizer == "AdamW":
        train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), range(6, 9))
        train(
            model, torch.optim.RMSprop(model.parameters(), foreach=True), range(9, 11), clip=False
        )
        describe(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
