# SPDX-License-Identifier: Apache-2.0
"""Losses and weights beside DDP's and FSDP2's: the trainings that are compared, and the verdicts.

An engine that does the same arithmetic must give the same bits. Where the order of sums may differ,
it may differ from PyTorch by rounding: see `rounding`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import torch

from fullshard.prove.claims import Claim, Section
from fullshard.prove.training import EngineRun, Training, train_on_local_ranks

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
