# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: each expert on some ranks, everything else in shards over all of them.

    torchrun --nproc-per-node 4 examples/experts.py
    python examples/experts.py

Rows travel to the ranks of their experts and back; none is dropped. On GPUs where there are some,
else on the CPU.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fullshard as sft
from fullshard.torch import clip_grad_norm_, fully_shard, shard_experts

EXPERTS = 8
STEPS = 30


def grouped(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply ``rows`` (n, a), in groups of ``counts`` (e,) rows, by ``weights`` (e, a, b)."""
    if rows.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        return torch._grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


class Experts(nn.Module):
    """Feed-forwards side by side in two stacked parameters."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, width) * hidden**-0.5)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run this rank's experts, each on its ``counts`` (e,) of ``rows`` (n, width)."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return grouped(F.silu(grouped(rows, up, counts)), down, counts)


class MixtureOfExperts(nn.Module):
    """Each row goes to the experts that a router gives the most weight.

    ``group`` joins the ranks over which the experts are dealt out; None: all are here.
    """

    def __init__(
        self,
        experts: nn.Module,
        width: int,
        *,
        active: int = 2,
        group: dist.ProcessGroup | None = None,
        count: int = EXPERTS,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = experts
        self.active, self.group = active, group

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` (..., width) on its own."""
        rows = x.flatten(0, -2)
        weights, chosen = self.router(rows).softmax(-1).topk(self.active)
        order = chosen.flatten().argsort(stable=True)  # by expert; row r is there `active` times
        counts = chosen.flatten().bincount(minlength=self.router.out_features)
        done = self._at_experts(rows[order // self.active], counts)
        done = done * weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // self.active, done).view_as(x)

    def _at_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return what experts make of ``rows``, of which ``counts`` (all experts,) are for each."""
        if self.group is None:
            return self.experts(rows, counts)
        ranks = self.group.size()
        arriving = torch.empty_like(counts)  # for each of this rank's experts, from each rank
        dist.all_to_all_single(arriving, counts, group=self.group)
        to, fro = (each.view(ranks, -1).sum(1).tolist() for each in (counts, arriving))
        arrived = all_to_all_single_autograd(rows, fro, to, self.group)
        mine = len(arriving) // ranks
        expert = torch.arange(mine, device=rows.device).repeat(ranks)
        by_expert = expert.repeat_interleave(arriving).argsort(stable=True)
        done = self.experts(arrived[by_expert], arriving.view(ranks, mine).sum(0))
        return all_to_all_single_autograd(done[by_expert.argsort()], to, fro, self.group)


class Block(nn.Module):
    """A layer that all ranks share, then the experts, each added to its input."""

    def __init__(self, mixture: MixtureOfExperts, width: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.shared(x))
        return x + self.mixture(self.norm(x))


def main() -> None:
    sft.initialize_distributed_training()
    device, world = sft.get_device(), dist.get_world_size()
    across = 2 if world % 2 == 0 else 1  # ranks over which the experts are dealt out
    mesh = init_device_mesh(
        device.type, (world // across, across), mesh_dim_names=("shard", "experts")
    )
    torch.manual_seed(0)  # every rank builds the same
    width = 32
    with device:
        blocks = [
            Block(
                MixtureOfExperts(
                    Experts(EXPERTS, width, 64), width, group=mesh.get_group("experts")
                ),
                width,
            )
            for _ in range(2)
        ]
        model = nn.Sequential(*blocks, nn.Linear(width, 1))
    for block in blocks:
        shard_experts(block.mixture.experts, mesh=mesh, experts="experts")
        fully_shard(block)  # what is left of it, over all ranks
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rank = dist.get_rank()
    samples = torch.Generator().manual_seed(rank)
    inputs = torch.randn(64, width, generator=samples).to(device)
    targets = inputs[:, :4].prod(1, keepdim=True)
    for step in range(STEPS):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)  # one, over both meshes
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            print(f"rank {rank}: step {step + 1}, loss {loss.item():.4f}, norm {norm.item():.4f}")
    experts = blocks[0].mixture.experts.up
    print(f"rank {rank} holds {experts.to_local().numel()} of {experts.numel()} in {experts.shape}")
    sft.cleanup()


if __name__ == "__main__":
    main()
