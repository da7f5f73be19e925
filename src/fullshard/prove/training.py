# SPDX-License-Identifier: Apache-2.0
"""Train alike by several engines, on local ranks over Gloo; tell losses and weights.

Nothing in here judges: `fullshard.prove.losses` does.
"""

import json
import pydoc_data.topics
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fullshard.core.presets import TRANSFORMERS
from fullshard.core.strategy import ShardingStrategy
from fullshard.distributed import cleanup, join
from fullshard.local_ranks import run_local_ranks
from fullshard.torch import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.train.torch.models import GPT, Block
from fullshard.wrap import ModuleWrapPolicy

SEQUENCES, POSITIONS = 2, 64  # a micro-batch of a rank
JOIN_S = 300.0


@dataclass(frozen=True)
class Training:
    """One way to train a small GPT; the first of ``engines`` is what others are compared with.

    ``exact``: on two ranks a sum has one order, so that equal arithmetic gives equal bits.
    """

    name: str
    engines: tuple[str, ...]
    ranks: int = 2
    micro_batches: int = 1
    max_norm: float | None = None
    bf16: bool = False
    exact: bool = True


@dataclass(frozen=True)
class EngineRun:
    """The results of one engine: a loss for each rank and step, and its weights.

    ``distance`` is that of the weights from those of the first engine's first run, relative to
    their norm; 0 means that all bits are equal.
    """

    engine: str
    losses: tuple[tuple[float, ...], ...]
    distance: float


def _by_blocks(shard: Callable[..., Any], policy: Any) -> Callable[..., nn.Module]:
    def make(model: nn.Module, training: Training) -> nn.Module:
        # Where there is a GPU PyTorch's would take it, and the batches are on the host.
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
        if training.bf16:
            options["mp_policy"] = policy(torch.bfloat16, torch.float32)
        for module in model.modules():
            if isinstance(module, Block):
                shard(module, **options)
        shard(model, **options)
        return model

    return make


def _wrapped(strategy: ShardingStrategy) -> Callable[..., nn.Module]:
    def make(model: nn.Module, training: Training) -> nn.Module:
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), sharding_strategy=strategy
        )

    return make


ENGINES: dict[str, Callable[[nn.Module, Training], nn.Module]] = {
    "DDP": lambda model, _: DistributedDataParallel(model),
    "FSDP2": _by_blocks(torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy),
    "fully_shard": _by_blocks(fully_shard, MixedPrecisionPolicy),
    "FullyShardedDataParallel": _wrapped(ShardingStrategy.FULL_SHARD),
    "SHARD_GRAD_OP": _wrapped(ShardingStrategy.SHARD_GRAD_OP),
}


def train_on_local_ranks(
    trainings: tuple[Training, ...], steps: int, timeout_s: float
) -> dict[str, list[EngineRun]]:
    """Train by every engine of every training, all of them twice; runs by the training's name.

    Starts the ranks, and ends them. ``timeout_s`` bounds the whole, in seconds.

    Raises:
        CommunicationError: if a rank fails, in its words, or the ranks take longer.
    """
    found: dict[str, list[EngineRun]] = {}
    for ranks in sorted({each.ranks for each in trainings}):
        chosen = tuple(each for each in trainings if each.ranks == ranks)
        text = run_local_ranks(_train_all, (chosen, steps), ranks, timeout_s)
        assert text is not None  # rank 0 returns it, or fails
        for name, runs in json.loads(text).items():
            found[name] = [
                EngineRun(run["engine"], tuple(map(tuple, run["losses"])), run["distance"])
                for run in runs
            ]
    return found


def _train_all(trainings: tuple[Training, ...], steps: int) -> str:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of torch's, about themselves
    join("gloo", JOIN_S)
    try:
        found = {each.name: [asdict(run) for run in _runs(each, steps)] for each in trainings}
    finally:
        cleanup()
    return json.dumps(found)


def _runs(training: Training, steps: int) -> list[EngineRun]:
    """Run A B A B: every engine once, then every engine again."""
    runs, first = [], None
    for engine in training.engines * 2:
        losses, weights = _train(ENGINES[engine], training, steps)
        first = weights if first is None else first
        equal = torch.equal(weights, first)
        distance = 0.0 if equal else float((weights - first).norm() / first.norm())
        runs.append(EngineRun(engine, losses, distance))
    return runs


def _train(
    make: Callable[[nn.Module, Training], nn.Module], training: Training, steps: int
) -> tuple[tuple[tuple[float, ...], ...], Tensor]:
    torch.manual_seed(0)
    model = make(GPT(TRANSFORMERS["nano"], POSITIONS), training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(bytearray(_TEXT), dtype=torch.long)
    places = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        total = 0.0
        for number in range(training.micro_batches):
            last = number == training.micro_batches - 1
            with _without_reduces(model, training, last):
                starts = torch.randint(len(text) - POSITIONS - 1, (SEQUENCES,), generator=places)
                tokens = torch.stack([text[at : at + POSITIONS + 1] for at in starts.tolist()])
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                backward: Any = (loss / training.micro_batches).backward
                backward()
            total += loss.item() / training.micro_batches
        if training.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    mine = torch.tensor(losses, dtype=torch.float64)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    return tuple(tuple(theirs.tolist()) for theirs in of_ranks), _weights(model)


def _without_reduces(model: Any, training: Training, last: bool) -> Any:
    """Leave the reduces of all but the ``last`` micro-batch out, as the engine has it."""
    if training.micro_batches == 1:
        return nullcontext()
    if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        return nullcontext() if last else model.no_sync()
    model.set_requires_gradient_sync(last)
    return nullcontext()


def _weights(model: nn.Module) -> Tensor:
    """Return all parameters, whole, in one tensor of shape (elements,). Collective."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


_TEXT = "\n".join(pydoc_data.topics.topics.values()).encode()
