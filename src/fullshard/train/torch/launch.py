# SPDX-License-Identifier: Apache-2.0
"""From one command to a run: ranks joined or started here, data, a sharded model, its optimizer."""

import os
import signal
import sys

import torch
from torch import nn

from fullshard.core.errors import CommunicationError
from fullshard.core.presets import transformer
from fullshard.distributed import local_nproc
from fullshard.launchers import launcher_environment, threads_per_rank, usable_cores
from fullshard.local_ranks import run_local_ranks
from fullshard.torch import FullyShardedDataParallel, ShardingStrategy, load_full_weights
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.inspection import Bytes
from fullshard.train.config import Config, OptimConfig
from fullshard.train.data import load
from fullshard.train.fits import check_run
from fullshard.train.loop import train
from fullshard.train.signals import COME_AGAIN
from fullshard.train.torch.models import (
    GPT,
    Block,
    DigitNet,
    FeedForward,
    IllustratedGPT,
    PictureTower,
)
from fullshard.train.torch.run import RankWorld, TorchRun, joined
from fullshard.wrap import ModuleWrapPolicy

GRACE_S = 120.0  # that ranks have to save after a signal
_OPTIONAL: dict[str, type[nn.Module]] = {"moe": FeedForward, "vlm": PictureTower}
"""The class of modules, by model, that are units which ranks may leave out."""


def launch(config: Config, nproc: int | None = None) -> int:
    """Train as ``config`` says, on the ranks of a launcher or on ``nproc`` local ones.

    Returns the exit status. Raises `ConfigurationError` before any rank is started.
    """
    found = launcher_environment(os.environ, local_only=nproc is not None)
    if found is not None:
        os.environ.update(found)
        size = int(os.environ["WORLD_SIZE"])
        check_run(config, size, int(os.environ.get("LOCAL_WORLD_SIZE", size)), _gpu_bytes())
        _train_here(config)
        return 0
    nproc = local_nproc(nproc)
    check_run(config, nproc, nproc, _gpu_bytes())
    load(config)  # only to see that it can be: a missing corpus is refused here, once
    return _start_local(config, nproc)


def _gpu_bytes() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _start_local(config: Config, nproc: int) -> int:
    cores = usable_cores()
    given = os.environ.get("OMP_NUM_THREADS")
    threads = os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(nproc, cores)))
    place = "one GPU each" if torch.cuda.is_available() else f"{cores} cores, no GPU"
    source = " (from OMP_NUM_THREADS)" if given else ""
    print(f"starting {nproc} rank{'s'[: nproc > 1]}: {place}, {threads} CPU threads each{source}")
    try:
        run_local_ranks(_train_here, (config,), nproc, grace_s=GRACE_S)
    except CommunicationError as error:
        print(f"\nfullshard train: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as stopped:
        code = int(stopped.code or 0) if isinstance(stopped, SystemExit) else 130
        how = "stopped and saved; --resume goes on" if code == COME_AGAIN else "interrupted"
        print(f"\nfullshard train: {how}; all ranks have ended", file=sys.stderr)
        # Ranks that were not yet training have nothing to save, and end by the signal itself.
        asked = code in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
        return COME_AGAIN if asked else code
    return 0


def _train_here(config: Config) -> None:
    with joined(ask_hosts=config.model.name in _OPTIONAL) as world:
        train(prepare(config, world))


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
    optional = [_OPTIONAL[name]] if (name := config.model.name) in _OPTIONAL else []
    units: set[type[nn.Module]] = {Block} if config.of_text else {nn.Conv2d, nn.Linear}
    return FullyShardedDataParallel(
        plain,
        ranks,
        auto_wrap_policy=ModuleWrapPolicy({*units, *optional}),
        sharding_strategy=ShardingStrategy[config.shard.strategy],
        optional_modules=[each for each in plain.modules() if type(each) in optional],
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
