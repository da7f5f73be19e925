# SPDX-License-Identifier: Apache-2.0
"""Make the parts of a run from its settings: data, a sharded model and its optimizer."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.core.presets import training_flops_per_token, transformer
from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, load_full_weights
from fullshard.torch.inspection import Bytes
from fullshard.train.config import Config, OptimConfig
from fullshard.train.data import Dataset, load
from fullshard.train.summary import Facts
from fullshard.train.torch.models import GPT, Block, DigitNet
from fullshard.train.torch.world import World
from fullshard.wrap import ModuleWrapPolicy

__all__ = ["TorchModel", "TorchRun", "build_model", "prepare"]


@dataclass(frozen=True)
class TorchModel:
    """A model before sharding: which of its modules become units, and what a token costs.

    ``flops_per_token`` counts forward and backward.
    """

    module: nn.Module
    unit_classes: set[type[nn.Module]]
    flops_per_token: float


@dataclass(frozen=True)
class TorchRun:
    """The parts of a run on one rank; ``unsharded`` is the memory that one process would need."""

    config: Config
    world: World
    data: Dataset
    model: nn.Module
    optimizer: torch.optim.Optimizer
    flops_per_token: float
    unsharded: Bytes

    @property
    def facts(self) -> Facts:
        """Facts about the run, known before it begins."""
        numel = sum(param.numel() for param in self.model.parameters())
        where = f"{self.world.size} ranks on {self.world.device.type}"
        return Facts(self.data, numel, self.flops_per_token, where)

    @property
    def local_batch(self) -> int:
        """Samples of a step on one rank."""
        return self.config.train.batch // self.world.size

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return _dtype(self.config)


def prepare(config: Config, world: World) -> TorchRun:
    """Load the data, build the model alike on every rank, shard it, then make its optimizer.

    Collective. In this order: an optimizer made before sharding would hold parameters that the
    model no longer has.
    """
    data = load(config)
    torch.manual_seed(config.train.seed)
    with torch.device(world.device):
        plain = build_model(config)
    unsharded = Bytes.unsharded(plain.module)
    model = FullyShardedDataParallel(
        plain.module,
        auto_wrap_policy=ModuleWrapPolicy(plain.unit_classes),
        sharding_strategy=ShardingStrategy[config.shard.strategy],
    )
    if config.train.initial_weights:
        load_full_weights(model, config.train.initial_weights)
    torch.manual_seed(config.train.seed + 1 + world.rank)  # dropout differs between ranks
    optimizer = _adamw(model, config.optim)
    return TorchRun(config, world, data, model, optimizer, plain.flops_per_token, unsharded)


def build_model(config: Config) -> TorchModel:
    """Return the plain model on torch's default device, with parameters of the dtype asked for."""
    if config.model.name == "gpt":
        shape = transformer(config.model.preset)
        flops = training_flops_per_token(shape, config.context)
        plain = TorchModel(GPT(shape, config.context), {Block}, flops)
    else:
        plain = TorchModel(DigitNet(), {nn.Conv2d, nn.Linear}, _digit_flops())
    for param in plain.module.parameters():  # not buffers: rotary angles stay exact
        param.data = param.data.to(_dtype(config))
    return plain


def _dtype(config: Config) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.train.dtype]


def _digit_flops() -> float:
    """Forward FLOPs of one image as torch counts them, and twice that for backward."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        DigitNet()(torch.empty(1, 1, 28, 28))
    return 3.0 * int(counter.get_total_flops())


def _adamw(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
