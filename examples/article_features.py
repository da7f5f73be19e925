# SPDX-License-Identifier: Apache-2.0
"""What keeps a large model within memory, and a run alive: all of it at once, on a small model.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 3 examples/article_features.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/article_features.py --fail-at-step 25

Mixed precision, recomputed activations, hybrid sharding, shards in host memory (`--offload`), and a
figure for what each rank holds. A byte-level language model learns the text of Python's own help.

If a rank dies, torchrun starts all of them again, perhaps fewer or more. Then the last checkpoint
is loaded, and training goes on with the sample after the last one that went into it. (The variable
gives each start a store of its own: ranks that share torchrun's would find the addresses of those
before them, https://github.com/pytorch/pytorch/issues/135712.)
"""

import argparse
import functools
import os
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.utils.data import DataLoader, DistributedSampler, Subset

import fullshard as sft
from fullshard.torch import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    inspection,
)
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.wrap import transformer_auto_wrap_policy

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(hidden)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0)
        heads = F.scaled_dot_product_attention(*qkv.transpose(2, 3), is_causal=True)
        hidden = hidden + self.out(heads.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norm2(hidden))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.head(self.blocks(self.bytes(text) + self.places(places)))


def sharded_model(offload: bool) -> FSDP:
    torch.manual_seed(0)
    model = FSDP(
        LanguageModel(),
        device_id=sft.get_device(),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        # Ranks of a host share slices, hosts hold equal ones: gathers never leave a host.
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        # Gathered and computed with in BF16; kept, reduced and optimised in FP32.
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        cpu_offload=CPUOffload(offload_params=offload),
    )
    # A block's activations are computed again in backward, when it is gathered anyway.
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def windows() -> torch.Tensor:
    """Pieces of one byte more than the context: inputs, and the same one byte on."""
    text = "".join(pydoc_data.topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)


class Progress:
    """How far training is: the epoch, and the samples of it that all ranks together have seen."""

    def __init__(self, step: int = 0, epoch: int = 0, samples: int = 0) -> None:
        self.step, self.epoch, self.samples = step, epoch, samples

    def batches(self, dataset: Any, batch_size: int) -> Any:
        """The rest of this epoch, then the next ones, without end.

        The sampler deals its shuffled list out like cards, so ranks of any number have seen the
        first `samples` of it; what comes after is dealt anew.
        """
        while True:
            sampler = DistributedSampler(dataset, drop_last=True)
            sampler.set_epoch(self.epoch)
            skipped = self.samples // dist.get_world_size()
            rest = Subset(dataset, list(sampler)[skipped:])
            for batch in DataLoader(rest, batch_size, drop_last=True):
                self.step += 1
                self.samples += batch_size * dist.get_world_size()
                yield batch
            self.epoch, self.samples = self.epoch + 1, 0


def save(path: Path, model: FSDP, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """All ranks gather, parameter by parameter, into rank 0's host memory; rank 0 writes."""
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "progress": vars(progress),
        }
    if dist.get_rank() == 0:
        staging = path.with_name(f"{path.name}.partial")
        torch.save(state, staging)
        staging.replace(path)  # a run that dies while it writes leaves the one before
    dist.barrier()


def load(path: Path, model: FSDP, optimizer: torch.optim.Optimizer) -> Progress:
    """Every rank reads its own part of the whole; the number of ranks may have changed."""
    state = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    model.load_state_dict(state["model"])
    FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"], load_directly=True)
    return Progress(**state["progress"])


def fail_once(progress: Progress, at_step: int | None) -> None:
    """What a host that loses power looks like to the others, in the first life of the run."""
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if progress.step == at_step and first_life and dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="windows for each rank")
    parser.add_argument("--checkpoint", type=Path, default=Path("article_features.pt"))
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--offload", action="store_true", help="shards rest in host memory")
    parser.add_argument("--fail-at-step", type=int, help="lose a rank there, once")
    args = parser.parse_args()

    sft.initialize_distributed_training()
    model = sharded_model(args.offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    progress = Progress()
    if args.checkpoint.exists():
        progress = load(args.checkpoint, model, optimizer)
        sft.log(f"goes on after step {progress.step}, with sample {progress.samples}")
    batches = progress.batches(windows(), args.batch_size)
    while progress.step < args.steps:
        text = next(batches).to(sft.get_device()).long()
        loss = F.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if progress.step % 10 == 0:
            sft.log(f"step {progress.step}, loss {loss.item():.4f}")
        if progress.step % args.save_every == 0:
            save(args.checkpoint, model, optimizer, progress)
        fail_once(progress, args.fail_at_step)
    sft.log(f"rank 0 holds, in bytes:\n{inspection.memory_summary(model, optimizer)}")
    sft.log(inspection.memory_of_rank(), all_ranks=True)
    sft.cleanup()


if __name__ == "__main__":
    main()
