# SPDX-License-Identifier: Apache-2.0
"""Make the parts of a run from its settings: data, a sharded model and its optimizer."""

import torch
from torch import nn

from fullshard.core.presets import transformer
from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, load_full_weights
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.inspection import Bytes
from fullshard.train.config import Config, OptimConfig
from fullshard.train.data import load
from fullshard.train.torch.models import (
    GPT,
    Block,
    DigitNet,
    FeedForward,
    IllustratedGPT,
    PictureTower,
)
from fullshard.train.torch.run import TorchRun
from fullshard.train.torch.world import RankWorld
from fullshard.wrap import ModuleWrapPolicy

__all__ = ["OPTIONAL", "build_model", "make_optimizer", "prepare", "shard"]

_UNITS: dict[str, set[type[nn.Module]]] = {
    "gpt": {Block},
    "moe": {Block},
    "vlm": {Block},
    "mnist": {nn.Conv2d, nn.Linear},
}
OPTIONAL: dict[str, type[nn.Module]] = {"moe": FeedForward, "vlm": PictureTower}
"""The class of modules, by model, that are units which ranks may leave out."""


def prepare(config: Config, world: RankWorld) -> TorchRun:
    """Load the data, build the model alike on every rank, shard it, then make its optimizer.

    Collective. In this order: an optimizer made before sharding would hold parameters that the
    model no longer has.
    """
    data = load(config)
    torch.manual_seed(config.train.seed)
    with torch.device(world.device):
        plain = build_model(config)
    unsharded = Bytes.unsharded(plain)
    model = shard(plain, config)
    if config.train.initial_weights:
        load_full_weights(model, config.train.initial_weights)
    torch.manual_seed(config.train.seed + 1 + world.part[0])  # dropout differs between ranks
    return TorchRun(config, world, data, model, make_optimizer(model, config.optim), unsharded)


def shard(plain: nn.Module, config: Config, ranks: Comm | None = None) -> nn.Module:
    """Return ``plain`` in shards over ``ranks``, all unless some are named. Collective."""
    name = config.model.name
    optional = OPTIONAL.get(name)
    parts = [part for part in plain.modules() if optional and isinstance(part, optional)]
    return FullyShardedDataParallel(
        plain,
        ranks,
        auto_wrap_policy=ModuleWrapPolicy(_UNITS[name] | ({optional} if optional else set())),
        sharding_strategy=ShardingStrategy[config.shard.strategy],
        optional_modules=parts,
    )


def build_model(config: Config) -> nn.Module:
    """Return the plain model on torch's default device, with parameters of the dtype asked for."""
    plain: nn.Module
    if config.model.name == "mnist":
        plain = DigitNet()
    elif config.model.name == "vlm":
        plain = IllustratedGPT(transformer(config.model.preset), config.context)
    else:
        experts = config.model.experts if config.model.name == "moe" else 0
        plain = GPT(transformer(config.model.preset), config.context, experts)
    for param in plain.parameters():  # not buffers: rotary angles stay exact
        param.data = param.data.to(getattr(torch, config.train.dtype))
    return plain


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW in which matrices decay, and norms and biases do not."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
