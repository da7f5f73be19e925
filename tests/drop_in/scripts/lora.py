# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters on a frozen base, sharded by either of PyTorch's ways."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    OffloadPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    _or_policy,
    lambda_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

# Between CPU and CPU, PyTorch frees what it then reads.
ON_GPU = torch.cuda.is_available()
WIDTH, RANK = 24, 4


class LoRALinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x)) / RANK


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def add_adapters(model):
    model.requires_grad_(False)
    for block in model:
        block.up, block.down = LoRALinear(block.up), LoRALinear(block.down)
    return model


def has_own_trained_weights(module):
    return not list(module.children()) and any(p.requires_grad for p in module.parameters())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--separate-units", action="store_true", help="as FSDP1 once asked for")
    parser.add_argument("--checkpoint-dir", default="")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = add_adapters(nn.Sequential(*(Block() for _ in range(3))))
    if args.fsdp2:
        offload = CPUOffloadPolicy(pin_memory=ON_GPU) if args.offload else OffloadPolicy()
        for block in model:
            fully_shard(block, offload_policy=offload)
        fully_shard(model, offload_policy=offload)
    else:
        blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=has_own_trained_weights)
        both = functools.partial(_or_policy, policies=[adapters, blocks])
        model = FSDP(
            model,
            auto_wrap_policy=both if args.separate_units else blocks,
            use_orig_params=not args.separate_units,
            device_id=torch.device("cpu"),
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)

    for step in range(10):
        generator = torch.Generator().manual_seed(2 * step + rank)
        inputs = torch.randn(8, WIDTH, generator=generator)
        loss = (model(inputs) - inputs.roll(1, -1)).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.8f}")

    if args.checkpoint_dir and not args.fsdp2:
        whole = FullStateDictConfig(offload_to_cpu=ON_GPU, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
            weights = model.state_dict()
        if rank == 0:
            adapters = {name: value for name, value in weights.items() if "lora" in name}
            path = os.path.join(args.checkpoint_dir, "adapters.pt")
            torch.save(adapters, path)
            for name, value in torch.load(path, weights_only=True).items():
                print(f"{name} {tuple(value.shape)} loss {value.double().norm():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
