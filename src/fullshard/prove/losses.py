# SPDX-License-Identifier: Apache-2.0
"""Losses and weights beside DDP's and FSDP2's: the trainings that are compared, and the verdicts.

An engine that does the same arithmetic must give the same bits. Where the order of sums may differ,
it may differ from PyTorch by rounding: see `rounding`.
"""

import json
import pydoc_data.topics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from fullshard.prove.claims import Claim, Section
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


_ALL = ("DDP", "FSDP2", "fully_shard", "FullyShardedDataParallel", "SHARD_GRAD_OP")
_OURS = ("fully_shard", "FullyShardedDataParallel", "SHARD_GRAD_OP")

TRAININGS = (
    Training("2 ranks, float32", _ALL),
    Training("2 ranks, float32, accumulation", _ALL, micro_batches=3),
    Training("2 ranks, float32, clipping", _ALL, max_norm=0.5, exact=False),
    Training("2 ranks, bfloat16", ("FSDP2", "fully_shard"), bf16=True),
    Training("3 ranks, float32", _ALL, ranks=3, exact=False),
)
_SUMMANDS = 8  # how often a value is rounded, in one update, in an order that may differ

_HOW = (
    "Each engine trains the same small GPT (4 layers, width 128) on the same bytes of Python's "
    "documentation, on local ranks over Gloo, with AdamW; engines take turns, and all run twice. "
    "Accumulation is 3 micro-batches with one reduce; bfloat16 is reduced in float32. "
    "The noise floor is the largest difference of an engine from itself. Two ranks add two "
    "numbers, which has one order: there, losses of all steps and ranks and all weights must be "
    "equal bit by bit to those of the first engine, which is PyTorch's. Elsewhere losses may "
    "differ by what float32's rounding explains: 4 x 2^-23 x (1 + steps), relative."
)


def rounding(steps: int) -> float:
    """Return the relative difference of losses that rounding explains after this many updates.

    Every update rounds sums of some summands, by half an ``eps`` each, in an order that may differ,
    and the difference of the update before adds to that: ``d = d0 * (1 + steps)``.
    """
    return _SUMMANDS * torch.finfo(torch.float32).eps / 2 * (1 + steps)


def prove_losses(steps: int, timeout_s: float) -> Section:
    """Train by all engines, twice, on local ranks. Raises `CommunicationError` if one fails."""
    runs = train_on_local_ranks(TRAININGS, steps, timeout_s)
    claims = tuple(loss_claims(TRAININGS, runs))
    data = {name: [asdict(run) for run in each] for name, each in runs.items()}
    return Section(f"Losses and weights of {steps} steps", _HOW, claims, data)


def loss_claims(
    trainings: Sequence[Training], runs: Mapping[str, Sequence[EngineRun]]
) -> Iterator[Claim]:
    """Judge ``runs`` by the training's name: the noise floor first, then each of our engines."""
    floor = max(floor_of(runs[each.name]) for each in trainings)
    yield Claim.that(
        "every engine repeats itself (A/A)", floor == 0, _relative(floor), "bit by bit"
    )
    for training in trainings:
        first, *others = runs[training.name]
        yield from _learning(training, first)
        for run in others[: len(training.engines) - 1]:
            yield _beside(training, first, run)


def floor_of(runs: Sequence[EngineRun]) -> float:
    """Return the largest difference between two runs of one engine, of losses or weights."""
    by_engine: dict[str, list[EngineRun]] = {}
    for run in runs:
        by_engine.setdefault(run.engine, []).append(run)
    return max(
        max(_difference(first, other), abs(first.distance - other.distance))
        for first, *others in by_engine.values()
        for other in others
    )


def _learning(training: Training, run: EngineRun) -> Iterator[Claim]:
    """Equal losses prove nothing if nobody learns: they must fall, and be numbers."""
    begin, end = (sum(each[place] for each in run.losses) / len(run.losses) for place in (0, -1))
    yield Claim.that(
        f"{training.name}: {run.engine} learns", end < begin, f"{begin:.3f} to {end:.3f}", "falls"
    )


def _beside(training: Training, first: EngineRun, run: EngineRun) -> Claim:
    steps = len(first.losses[0])
    allowed = 0.0 if training.exact else rounding(steps)
    difference = _difference(first, run)
    equal = difference <= allowed and (run.distance == 0 or not training.exact)
    figure = f"losses {_relative(difference)}, weights {_relative(run.distance)}"
    bound = "bit by bit" if training.exact else f"losses {allowed:.1e}"
    control = "" if run.engine in _OURS else " (control)"
    what = f"{training.name}: {run.engine} as {first.engine}{control}"
    return Claim.that(what, equal, figure, bound)


def _difference(first: EngineRun, other: EngineRun) -> float:
    """Return the largest relative difference of a loss; infinite where one is not a number."""
    pairs = [
        (a, b)
        for one, two in zip(first.losses, other.losses, strict=True)
        for a, b in zip(one, two, strict=True)
    ]
    differences = [abs(a - b) / max(abs(a), 1e-30) for a, b in pairs]
    return max(d if d == d else float("inf") for d in differences)


def _relative(difference: float) -> str:
    return "equal" if difference == 0 else f"{difference:.1e} apart"
