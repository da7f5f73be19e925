# SPDX-License-Identifier: Apache-2.0
"""The training loop of `fullshard train --engine jax`. Read it from `train` down.

One process drives all its devices, so that a step takes the whole batch: what the ranks of the
torch engine would take, one behind the other.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fullshard.jax import TrainState
from fullshard.train.config import Config, learning_rate
from fullshard.train.data import rank_slice
from fullshard.train.jax.checkpoints import StateCheckpoints
from fullshard.train.jax.closing import conclude
from fullshard.train.jax.setup import JaxRun, cross_entropy, prepare
from fullshard.train.metrics import Reporter, Speed
from fullshard.train.summary import introduce, open_folder, turn_away
from fullshard.train.survival import stop_request

__all__ = ["evaluate", "fit", "train", "train_step"]


def train(config: Config, devices: list[jax.Device]) -> None:
    """Train, validate, report and save as ``config`` says, on ``devices``.

    With several processes all of them must call. Raises `NonFiniteError` if a loss or gradient is
    not finite and the settings say stop, and `SystemExit` with `COME_AGAIN` when a signal has ended
    it after a save.
    """
    run, state = prepare(config, devices)
    folder = open_folder(config, run.devices)
    with Reporter(run.devices, folder, config.train.steps) as reporter, stop_request() as stop:
        introduce(config, run.facts, reporter)
        checkpoints = StateCheckpoints(run, folder, reporter, stop)
        try:
            state = fit(run, state, reporter, checkpoints)
        finally:  # what was begun before an error is worth having, too
            checkpoints.finish()
        reporter.validation(config.train.steps, *evaluate(run, state))
    conclude(run, state, reporter)


def fit(
    run: JaxRun, state: TrainState, reporter: Reporter, checkpoints: StateCheckpoints
) -> TrainState:
    """Do all training steps that are left; return the last state."""
    config, log = run.config.train, run.config.log
    peak = run.devices.peak_flops(config.dtype)
    speed = Speed(run.plain.flops_per_token, run.devices.size, peak)
    first = 0
    if checkpoints.there:
        state, first = checkpoints.resume(state)
    reporter.advance(first)
    for step in range(first, config.steps):
        speed.start()
        state, values = train_step(run, state, step, reporter)
        values["step_s"] = speed.stop(config.batch * run.data.tokens_per_sample)
        reporter.advance()
        done = step + 1
        if done % log.every == 0 or done in (first + 1, config.steps):
            values |= {**run.devices.memory_used(), **speed.take()}
        reporter.step(done, values, run.data.token)
        if done % config.eval_every == 0 and done < config.steps:
            reporter.validation(done, *evaluate(run, state))
        checkpoints.after_step(state, done)
    return state


def train_step(
    run: JaxRun, state: TrainState, step: int, reporter: Reporter
) -> tuple[TrainState, dict[str, float]]:
    """Do one step on the global batch; return the next state and what to report."""
    config = run.config
    numbers = rank_slice(step, config.train.batch, 0, 1)
    batch = run.batch(run.data.train_batch(config.train.seed, numbers))
    state, loss, _ = run.step(state, batch)
    values = {
        "loss": float(loss),
        "grad_norm": float(state.optimizer.grad_norm),
        "lr": learning_rate(config.optim, config.train.steps, step),
    }
    if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
        # The optimizer has seen it, too, and kept everything.
        turn_away(config.train.on_nonfinite, step, "a device", reporter)
    return state, values


def evaluate(run: JaxRun, state: TrainState) -> tuple[float, float]:
    """Return mean loss per target and accuracy over the held-back samples.

    The last batch is filled up with samples that count nothing.
    """
    count, size = run.data.validation_count, run.config.train.batch
    sums = np.zeros(3)
    for first in range(0, count, size):
        places = range(first, first + size)
        inputs, targets = run.batch(run.data.validation_batch([min(p, count - 1) for p in places]))
        counts = np.array([place < count for place in places], np.float32)
        found = run.step.evaluate(state, (inputs, targets, counts), _sums)
        sums += np.array([float(each) for each in found])
    loss, right, targets_seen = sums
    return loss / targets_seen, right / targets_seen


def _sums(model: Any, batch: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Return the sum of losses, right answers, and targets."""
    inputs, targets, counts = batch
    logits = model(inputs)
    losses = cross_entropy(logits, targets)
    weights = jnp.broadcast_to(counts.reshape(-1, *(1,) * (targets.ndim - 1)), targets.shape)
    right = (logits.argmax(-1) == targets) * weights
    return (losses * weights).sum(), right.sum(), weights.sum()
