# SPDX-License-Identifier: Apache-2.0
"""The training loop of `fullshard train`, as every rank runs it. Read it from `train` down."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from fullshard.core.trace import Trace
from fullshard.torch import tracing
from fullshard.train.config import Config, learning_rate
from fullshard.train.data import Batch, rank_slice
from fullshard.train.metrics import Reporter, Speed
from fullshard.train.summary import NonFiniteError, introduce, open_folder, turn_away
from fullshard.train.survival import stop_request
from fullshard.train.torch.checkpoints import ModelCheckpoints
from fullshard.train.torch.closing import conclude
from fullshard.train.torch.setup import TorchRun, prepare
from fullshard.train.torch.world import World

__all__ = ["agree", "evaluate", "fit", "train", "train_step"]


def train(config: Config, world: World) -> None:
    """Train, validate, report and save as ``config`` says. Collective: every rank calls it.

    Raises `NonFiniteError` on all ranks together if a loss or gradient is not finite and the
    settings say stop, and `SystemExit` with `COME_AGAIN` when a signal has ended it after a save.
    """
    run = prepare(config, world)
    folder = open_folder(config, world)
    with Reporter(world, folder, config.train.steps) as reporter, stop_request() as stop:
        introduce(config, run.facts, reporter)
        checkpoints = ModelCheckpoints(run, folder, reporter, stop)
        try:
            trace = fit(run, reporter, checkpoints)
        except NonFiniteError:  # on all ranks: what was begun before is worth having
            checkpoints.finish()
            raise
        checkpoints.finish()
        reporter.validation(config.train.steps, *evaluate(run))
    conclude(run, trace, reporter)


def fit(run: TorchRun, reporter: Reporter, checkpoints: ModelCheckpoints) -> Trace:
    """Do all training steps that are left; return the engine's trace of the second."""
    config, log = run.config.train, run.config.log
    speed = Speed(run.flops_per_token, run.world.size, run.world.peak_flops(run.dtype))
    trace = Trace()
    first = checkpoints.resume() if checkpoints.there else 0
    reporter.advance(first)
    for step in range(first, config.steps):
        speed.start()
        traced = step == min(first + 1, config.steps - 1)
        with tracing(run.model) if traced else nullcontext(trace) as trace:
            values = train_step(run, step, reporter)
        values["step_s"] = speed.stop(config.batch * run.data.tokens_per_sample)
        reporter.advance()
        done = step + 1
        if done % log.every == 0 or done in (first + 1, config.steps):
            values |= {**run.world.memory_used(), **speed.take()}
        reporter.step(done, values, run.data.token)
        if done % config.eval_every == 0 and done < config.steps:
            reporter.validation(done, *evaluate(run))
        checkpoints.after_step(done)
    return trace


def train_step(run: TorchRun, step: int, reporter: Reporter) -> dict[str, float]:
    """Do one step on this rank's slice of the batch; return what to report. Collective."""
    config, world = run.config, run.world
    numbers = rank_slice(step, config.train.batch, world.rank, world.size)
    batch = run.data.train_batch(config.train.seed, numbers)
    run.optimizer.zero_grad()
    logits, targets = _forward(run, batch)
    loss = F.cross_entropy(logits, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    # Without a limit nothing is scaled, but the norm is still worth knowing.
    norm = clip_grad_norm_(run.model.parameters(), config.optim.clip_norm or math.inf)
    mean_loss, nonfinite_ranks = agree(world, loss.detach(), norm)
    rate = learning_rate(config.optim, config.train.steps, step)
    if nonfinite_ranks:
        where = f"rank {', '.join(map(str, nonfinite_ranks))}"
        turn_away(config.train.on_nonfinite, step, where, reporter)
    else:
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        run.optimizer.step()
    return {"loss": mean_loss, "grad_norm": float(norm), "lr": rate}


def agree(world: World, loss: Tensor, norm: Tensor) -> tuple[float, list[int]]:
    """Return the mean loss over all ranks, and the ranks whose loss or gradient norm is not finite.

    Collective: one small all-reduce, after which every rank knows the same and takes the same turn.
    A norm over all ranks is not finite on every rank; then those with a bad loss are named, if any.
    """
    values = torch.zeros(2 * world.size + 1, dtype=torch.float64, device=world.device)
    values[0] = loss
    values[1 + 2 * world.rank] = not bool(torch.isfinite(loss))
    values[2 + 2 * world.rank] = not bool(torch.isfinite(norm))
    total, *flags = world.total(values).tolist()
    bad_loss, bad_norm = ([r for r in range(world.size) if flags[2 * r + k]] for k in (0, 1))
    return total / world.size, bad_loss or bad_norm


@torch.no_grad()
def evaluate(run: TorchRun) -> tuple[float, float]:
    """Return mean loss per target and accuracy over the held-back samples. Collective.

    Every rank must call forward equally often: one that has run out of samples repeats one and does
    not count it.
    """
    world, count = run.world, run.data.validation_count
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss, right, targets
    run.model.eval()
    for first in range(0, count, run.local_batch * world.size):
        mine = range(first + world.rank * run.local_batch, count)[: run.local_batch]
        logits, targets = _forward(run, run.data.validation_batch(mine or [0]))
        if mine:
            sums[0] += F.cross_entropy(logits, targets, reduction="sum")
            sums[1] += (logits.argmax(-1) == targets).sum()
            sums[2] += targets.numel()
    run.model.train()
    loss, right, targets_seen = world.total(sums).tolist()
    return loss / targets_seen, right / targets_seen


def _forward(run: TorchRun, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits, float32 (targets, classes), and the targets that belong to them, flat."""
    inputs, targets = (torch.as_tensor(part, device=run.world.device) for part in batch)
    if inputs.is_floating_point():
        inputs = inputs.to(run.dtype)
    logits = run.model(inputs)
    return logits.flatten(0, -2).float(), targets.flatten()
