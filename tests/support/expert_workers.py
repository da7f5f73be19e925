# SPDX-License-Identifier: Apache-2.0
"""Experts on an axis of their own, beside layers that all ranks share: units on two meshes."""

import torch
from support.models import seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.torch import fully_shard

WIDTH = 6
EXPERTS = 2
SAMPLES = 3  # of each rank
STEPS = 4
MAX_NORM = 0.05


class Experts(nn.Module):
    """Expert e takes the samples of the ranks with number e on the experts' axis."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x, expert):
        weight = self.weight
        if isinstance(weight, DTensor):
            weight, expert = weight.to_local(), 0
        return torch.tanh(x @ weight[expert])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.after = nn.Linear(WIDTH, 1)

    def forward(self, x, expert):
        return self.after(self.experts(self.before(x), expert))


def whole():
    return seeded(Net).double()


def batches(ranks):
    generator = torch.Generator().manual_seed(5)
    shape = (ranks, SAMPLES, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def update(model, optimizer):
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def train(group):
    """Norms and parameters after some steps on ranks (expert, data)."""
    mesh = init_device_mesh("cpu", (EXPERTS, 2), mesh_dim_names=("expert", "data"))
    rank, expert = group.rank(), mesh.get_local_rank("expert")
    model = whole()
    mine = model.experts.weight.detach().chunk(EXPERTS)[expert].clone()
    model.experts.weight = nn.Parameter(
        DTensor.from_local(mine, mesh["expert"], [Shard(0)], run_check=False)
    )
    fully_shard(model.experts, mesh=mesh["data"])
    # Its two ranks see half of the samples; gradients are means over those of all.
    model.experts.set_gradient_divide_factor(group.size())
    fully_shard(model.before, mesh=group)
    fully_shard(model, mesh=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for inputs in batches(group.size()):
        model(inputs[rank], expert).square().mean().backward()
        norms.append(update(model, optimizer))
    return norms, {name: param.detach().full_tensor() for name, param in model.named_parameters()}
