# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the documents that fullshard was asked for from, acted out again.

The calls and their options are the documents'; what a block leaves out is filled in. Beside the
imports, the device and the backend differ: CPU and Gloo. `docs/documents.md` lists them.
"""

import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn import TransformerEncoderLayer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fullshard as sft
from fullshard.core.errors import UsageError
from fullshard.torch import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

# ---- the minimal setup ---------------------------------------------------------------------------


class SimpleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(1024, 2048)
        self.relu = nn.ReLU()
        self.layer2 = nn.Linear(2048, 1024)

    def forward(self, inputs):
        return self.layer2(self.relu(self.layer1(inputs)))


def minimal_model(min_num_params=1e9, strategy="FULL_SHARD", offload_optimizer=False):
    torch.manual_seed(0)
    return FSDP(
        SimpleModel(),
        auto_wrap_policy=functools.partial(
            size_based_auto_wrap_policy, min_num_params=min_num_params
        ),
        sharding_strategy=getattr(FSDP.ShardingStrategy, strategy),
        cpu_offload=FSDP.CPUOffload(offload_optimizer=True) if offload_optimizer else None,
        backward_prefetch=FSDP.BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
    )


def minimal_setup(options):
    """Losses of two steps, the units, and the distance of the weights from one process's."""
    model = minimal_model(**options)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [_minimal_batch(each) for each in range(world)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    criterion = nn.MSELoss()
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = criterion(model(batches[rank][0]), batches[rank][1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    units = len(FSDP.fsdp_modules(model))
    state = model.state_dict()
    expected = _minimal_alone(batches)
    return losses, units, max((state[k] - v).abs().max().item() for k, v in expected.items())


def _minimal_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 32, 1024, generator=generator)


def _minimal_alone(batches):
    torch.manual_seed(0)
    model = SimpleModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, labels in batches:
            (F.mse_loss(model(inputs), labels) / len(batches)).backward()
        optimizer.step()
    return model.state_dict()


# ---- what the article praises --------------------------------------------------------------------


def article(offload):
    """Layers wrapped by hand, mixed precision, recomputation, a hybrid mesh: losses of a run."""
    hybrid = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    options = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": hybrid,
        "cpu_offload": CPUOffload(offload_params=offload),
    }
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    model = FSDP(nn.Sequential(*(FSDP(layer, **options) for layer in layers)), **options)
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, nn.Tanh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    inputs = torch.randn(16, 32)
    losses = []
    for _ in range(10):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(inputs).float(), inputs.roll(1, dims=1).tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---- helpers for a cluster -----------------------------------------------------------------------


class LargeModel(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.register_buffer("scale", torch.ones(16))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs * self.scale


class Large(TensorDataset):
    """Samples that are their own targets, rolled; each knows its number."""

    def __init__(self, count=32):
        generator = torch.Generator().manual_seed(0)
        super().__init__(torch.arange(count), torch.randn(count, 4, 16, generator=generator))


def train_step(model, optimizer, batch, device):
    inputs = batch[1].to(device)
    loss = F.mse_loss(model(inputs).float(), inputs.roll(1, dims=-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def cluster_training():
    """Joined, wrapped from the CPU, trained, logged, left: losses, and if a group was left."""
    sft.initialize_distributed_training()
    device = sft.get_device()
    torch.manual_seed(0)
    model = LargeModel()
    model = FSDP(model, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = Large()
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    losses = []
    for epoch in range(2):
        for batch in loader:
            loss = train_step(model, optimizer, batch, device)
        sft.log(f"Epoch {epoch}, Loss: {loss.item():.4f}")
        losses.append(loss.item())
    sft.cleanup()
    return losses, dist.is_initialized()


def checkpoint_on_one_rank(path):
    """The state dict asked for by rank 0 alone: its error, and the losses of going on after it."""
    sft.initialize_distributed_training()
    device = sft.get_device()
    model, optimizer, batch = _trained(device)
    message = None
    if dist.get_rank() == 0:
        policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        try:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
                state_dict = model.state_dict()
            torch.save({"model_state_dict": state_dict}, path)
        except UsageError as error:
            message = str(error)
    losses = [train_step(model, optimizer, batch, device).item() for _ in range(2)]
    return message, losses, Path(path).exists()


def checkpoint_by_all_ranks(path):
    """As it was meant: the losses of a run and of one that goes on from the checkpoint."""
    sft.initialize_distributed_training()
    device = sft.get_device()
    model, optimizer, batch = _trained(device)
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    optim_policy = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy, optim_policy):
        state_dict = model.state_dict()
        optim_state_dict = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        saved = {
            "epoch": 1,
            "model_state_dict": state_dict,
            "optimizer_state_dict": optim_state_dict,
        }
        torch.save(saved, path)
    dist.barrier()
    losses = [train_step(model, optimizer, batch, device).item() for _ in range(2)]

    found = torch.load(path, weights_only=True)
    other, other_optimizer, _ = _trained(device, seed=1)
    other.load_state_dict(found["model_state_dict"])
    to_load = FSDP.optim_state_dict_to_load(other, other_optimizer, found["optimizer_state_dict"])
    other_optimizer.load_state_dict(to_load)
    again = [train_step(other, other_optimizer, batch, device).item() for _ in range(2)]
    return losses, again, len(state_dict), len(optim_state_dict)


def _trained(device, seed=0):
    torch.manual_seed(seed)
    model = FSDP(LargeModel(), device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = next(iter(DataLoader(Large(), batch_size=8)))
    train_step(model, optimizer, batch, device)
    return model, optimizer, batch


def where_the_model_is_made():
    """Made on the CPU and moved by the wrapper, or moved before: the outputs of both."""
    sft.initialize_distributed_training()
    device = sft.get_device()
    outputs = []
    for move in (False, True):
        torch.manual_seed(0)
        model = LargeModel().to(device) if move else LargeModel()
        model = FSDP(model) if move else FSDP(model, device_id=device)
        outputs.append(model(torch.ones(1, 4, 16, device=device)).tolist())
    return outputs


def large_model_options(name):
    """BF16, a policy or hybrid sharding: units, dtypes and the losses of three steps."""
    sft.initialize_distributed_training()
    seen = {}
    torch.manual_seed(0)
    model = LargeModel()
    model.layers[0].linear1.register_forward_hook(
        lambda module, args, output: seen.update(inside=str(output.dtype))
    )
    model = FSDP(model, **_OPTIONS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = next(iter(DataLoader(Large(), batch_size=8)))
    losses = [train_step(model, optimizer, batch, sft.get_device()).item() for _ in range(3)]
    at_rest = {str(param.dtype) for param in model.parameters()}
    return len(FSDP.fsdp_modules(model)), seen["inside"], at_rest, str(model.scale.dtype), losses


_OPTIONS = {
    "bf16": {
        "mixed_precision": MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
        )
    },
    "by layer": {
        "auto_wrap_policy": functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={TransformerEncoderLayer}
        )
    },
    "by size": {
        "auto_wrap_policy": functools.partial(
            size_based_auto_wrap_policy, min_num_params=100_000_000
        )
    },
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}


def sampler_epochs(epochs):
    """The numbers of the samples that this rank sees in each epoch."""
    sft.initialize_distributed_training()
    dataset = Large()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, sampler=sampler)
    seen = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen.append([int(number) for number, _ in loader])
    return seen
