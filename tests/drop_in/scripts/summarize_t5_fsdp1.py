# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a small encoder-decoder on made-up summaries with FSDP; start with torchrun."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# Between CPU and CPU, PyTorch frees what it then reads.
ON_GPU = torch.cuda.is_available()
VOCABULARY, WIDTH, HEADS, LENGTH = 61, 32, 4, 12


class Summaries(Dataset):
    """The summary of a text is every second word of it."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.texts = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return text, text[::2]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        variance = x.float().square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, memory, causal=False):
        def heads(t):
            return t.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(mixed.transpose(-2, -3).flatten(-2))


class T5Block(nn.Module):
    def __init__(self, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(3 if is_decoder else 2))
        self.attention = Attention()
        self.cross = Attention() if is_decoder else None
        self.wi = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.wo = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x, memory=None):
        y = self.norms[0](x)
        x = x + self.attention(y, y, causal=self.is_decoder)
        if self.is_decoder:
            x = x + self.cross(self.norms[1](x), memory)
        return x + self.wo(F.relu(self.wi(self.norms[-1](x))))


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(T5Block(is_decoder=False) for _ in range(2))
        self.decoder = nn.ModuleList(T5Block(is_decoder=True) for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, texts, summaries):
        memory = self.shared(texts)
        for block in self.encoder:
            memory = block(memory)
        x = self.shared(F.pad(summaries[:, :-1], (1, 0)))
        for block in self.decoder:
            x = block(x, memory)
        logits = self.lm_head(self.norm(x) * WIDTH**-0.5)
        return F.cross_entropy(logits.flatten(0, 1).float(), summaries.flatten())


def wrap(model, args):
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={T5Block}
        ),
        mixed_precision=precision if args.bf16 else None,
        sharding_strategy=ShardingStrategy[args.strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )


def train(model, loader, sampler, optimizer, epoch, rank):
    model.train()
    sampler.set_epoch(epoch)
    for step, (texts, summaries) in enumerate(loader):
        optimizer.zero_grad()
        loss = model(texts, summaries)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {total.item() / dist.get_world_size():.8f}")


@torch.no_grad()
def validate(model, loader, rank, name):
    model.eval()
    sums = torch.zeros(2)
    for texts, summaries in loader:
        sums += torch.tensor([model(texts, summaries).item(), 1.0])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"{name} loss {sums[0] / sums[1]:.8f}")


def save_and_load(model, optimizer, args, rank):
    """What a full checkpoint and a sharded one bring back, in a model with other weights."""
    whole = FullStateDictConfig(offload_to_cpu=ON_GPU, rank0_only=True)
    whole_optimizer = FullOptimStateDictConfig(offload_to_cpu=ON_GPU, rank0_only=True)
    path = os.path.join(args.checkpoint_dir, "t5.pt")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole, whole_optimizer):
        weights = model.state_dict()
        states = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": weights, "optimizer": states}, path)
    dist.barrier()

    torch.manual_seed(1)
    plain = T5()
    saved = torch.load(path, weights_only=True)
    plain.load_state_dict(saved["model"])
    loaded = wrap(plain, args)
    new_optimizer = torch.optim.AdamW(loaded.parameters(), lr=args.lr)
    with FSDP.state_dict_type(loaded, StateDictType.FULL_STATE_DICT):
        states = FSDP.optim_state_dict_to_load(loaded, new_optimizer, saved["optimizer"])
    new_optimizer.load_state_dict(states)

    sharded = ShardedStateDictConfig(offload_to_cpu=False)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, sharded):
        weights = model.state_dict()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.mul_(0.5)
    with FSDP.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT, sharded):
        loaded.load_state_dict(weights)
    return loaded, new_optimizer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--checkpoint-dir", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    data, held_back = Summaries(40, seed=1), Summaries(16, seed=2)
    sampler = DistributedSampler(data, rank=rank, num_replicas=world, shuffle=True)
    held_sampler = DistributedSampler(held_back, rank=rank, num_replicas=world)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    held_loader = DataLoader(held_back, batch_size=4, sampler=held_sampler)

    model = wrap(T5(), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.8)
    for epoch in range(2):
        train(model, loader, sampler, optimizer, epoch, rank)
        validate(model, held_loader, rank, f"validation {epoch}")
        scheduler.step()
    if args.checkpoint_dir:
        model, optimizer = save_and_load(model, optimizer, args, rank)
        validate(model, held_loader, rank, "loaded")
        train(model, loader, sampler, optimizer, 2, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
