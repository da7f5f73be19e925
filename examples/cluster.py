# SPDX-License-Identifier: Apache-2.0
"""A transformer on a cluster: helpers, BF16, a wrap policy, hybrid sharding, a checkpoint.

    torchrun --nproc-per-node 2 examples/cluster.py
    sbatch examples/launch/slurm.sbatch examples/cluster.py

Learns which symbol is the most frequent one in a sequence, saves, and goes on from what it saved.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fullshard as sft
from fullshard.torch import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.wrap import transformer_auto_wrap_policy

SYMBOLS, LENGTH, WIDTH = 8, 24, 64


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(symbols)).mean(dim=1))


def sharded_model() -> FSDP:
    torch.manual_seed(0)
    return FSDP(
        Classifier(),  # on the CPU; the wrapper moves each rank's part and nothing else
        device_id=sft.get_device(),
        # Each layer is gathered while it runs and freed before the next but one.
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        # BF16 has FP32's range, so no loss scaling. What the optimizer updates stays in FP32, and
        # gradients are summed in it: a sum of many small terms is where BF16's 8 bits are missed.
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16
        ),
        # Slices are gathered within a host; between hosts only a gradient's slice travels.
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )


def sequences(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    symbols = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    return TensorDataset(symbols, F.one_hot(symbols, SYMBOLS).sum(dim=1).argmax(dim=1))


def train_epoch(model: FSDP, optimizer: torch.optim.Optimizer, loader: Any, epoch: int) -> float:
    """Train on this rank's part of the samples; the mean loss over all ranks."""
    loader.sampler.set_epoch(epoch)  # else each epoch has the order of the first
    losses = []
    for batch in loader:
        symbols, labels = (tensor.to(sft.get_device()) for tensor in batch)
        loss = F.cross_entropy(model(symbols).float(), labels)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def save(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """One file with everything, for any number of ranks.

    All ranks call this: each has a part of what rank 0 writes. The optimizer's own `state_dict()`
    stays sharded and knows parameters by number; here its state is whole too, and keyed by name.
    """
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": FSDP.optim_state_dict(model, optimizer),
    }
    if dist.get_rank() == 0:  # only the writing is for one rank
        staging = path.with_name(f"{path.name}.partial")
        torch.save(state, staging)
        staging.replace(path)  # whoever finds the file finds all of it
    dist.barrier()
    sft.log(f"saved epoch {epoch} to {path}")


def load(path: Path, model: FSDP, optimizer: torch.optim.Optimizer) -> int:
    """The epoch that is done. Each rank takes its own part of the file, which all can read."""
    state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    model.load_state_dict(state["model"])
    FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)
    return state["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("cluster.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()

    sft.initialize_distributed_training()
    model = sharded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    done = 0
    if args.resume:
        done = load(args.checkpoint, model, optimizer)
        sft.log(f"goes on after epoch {done}")
    dataset = sequences(2048)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    for epoch in range(done, args.epochs):
        loss = train_epoch(model, optimizer, loader, epoch)
        sft.log(f"epoch {epoch + 1}, loss {loss:.4f}")
        save(args.checkpoint, model, optimizer, epoch + 1)
    sft.cleanup()


if __name__ == "__main__":
    main()
