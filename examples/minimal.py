# SPDX-License-Identifier: Apache-2.0
"""A model of two layers behind FSDP1's wrapper, in as few lines as training takes.

    torchrun --nproc-per-node 2 examples/minimal.py
    python examples/minimal.py

On GPUs where there are some, else on the CPU. `train_loop.py` is the same behind FSDP2's door.
"""

import functools

import torch
from torch import nn

import fullshard as sft
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.wrap import size_based_auto_wrap_policy

STEPS = 20


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(1024, 2048)
        self.relu = nn.ReLU()
        self.layer2 = nn.Linear(2048, 1024)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.relu(self.layer1(inputs)))


def main() -> None:
    sft.initialize_distributed_training()
    device = sft.get_device()
    torch.manual_seed(0)  # every rank builds the same weights, on the CPU
    model = FSDP(
        TwoLayers(),
        # Both layers have more than a million parameters, so each becomes a unit of its own:
        # gathered when it runs, freed after. A model with nothing as large stays one unit.
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000),
        sharding_strategy=FSDP.ShardingStrategy.FULL_SHARD,
        backward_prefetch=FSDP.BackwardPrefetch.BACKWARD_PRE,
        device_id=device,  # the shards go there; the whole model never does
        use_orig_params=True,
    )
    # After wrapping: an optimizer made before would hold the parameters of the plain model.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    rank = torch.distributed.get_rank()
    samples = torch.Generator().manual_seed(rank)  # every rank has its own
    inputs = torch.randn(32, 1024, generator=samples).to(device)
    targets = torch.randn(32, 1024, generator=samples).to(device)
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            print(f"rank {rank}: step {step + 1}, loss {loss.item():.4f}", flush=True)
    sft.cleanup()


if __name__ == "__main__":
    main()
