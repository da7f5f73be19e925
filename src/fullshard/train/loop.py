# SPDX-License-Identifier: Apache-2.0
"""The training loop of `fullshard train`, on either engine. Read it from `train` down."""

from contextlib import nullcontext
from pathlib import Path

from fullshard.train.config import learning_rate
from fullshard.train.data import rank_slice
from fullshard.train.loggers import logging_to
from fullshard.train.metrics import (
    PROMPT,
    NonFiniteError,
    Reporter,
    Speed,
    bytes_table,
    introduce,
    say_files,
    say_report,
    say_sample,
    turn_away,
    writing,
)
from fullshard.train.run import TrainingRun
from fullshard.train.signals import stop_request
from fullshard.train.survival import FINISHED, RunCheckpoints, open_folder


def train(run: TrainingRun) -> None:
    """Train, validate, report and save as the run's settings say. Collective.

    Raises `NonFiniteError` in all processes together if a loss or gradient is not finite and the
    settings say stop, and `SystemExit` with `COME_AGAIN` when a signal has ended it after a save.
    """
    steps = run.config.train.steps
    folder = open_folder(run.config, run.world)
    place = run.world.shared_text(str(folder or ""))
    with (
        Reporter(run.world, folder, steps) as reporter,
        stop_request() as stop,
        run.recorded(place),
        logging_to(run.config, folder) as reporter.listeners,
    ):
        introduce(run, reporter)
        checkpoints = RunCheckpoints(run, folder, reporter, stop)
        try:
            fit(run, reporter, checkpoints)
        except NonFiniteError:  # in all processes: what was begun before is worth having
            checkpoints.finish()
            raise
        with run.record.span("checkpoint"):
            checkpoints.finish()
        with run.record.span("evaluation"):
            reporter.validation(steps, *run.evaluate())
    conclude(run, reporter)


def fit(run: TrainingRun, reporter: Reporter, checkpoints: RunCheckpoints) -> None:
    """Do all training steps that are left. Collective."""
    config, log, world = run.config.train, run.config.log, run.world
    speed = Speed(run.config.flops_per_token, world.size, world.peak_flops(config.dtype))
    with run.record.span("start"):
        first = checkpoints.resume()
    run.record.goes_on_from(first)
    reporter.advance(first)
    for step in range(first, config.steps):
        speed.start()
        second = step == min(first + 1, config.steps - 1)  # the first one compiles and records
        with run.observed() if second else nullcontext():
            values = train_step(run, step, reporter)
        tokens = config.batch * run.data.tokens_per_sample
        run.record.note(loss=values["loss"], tokens=tokens)
        values["step_s"] = speed.stop(tokens)
        reporter.advance()
        done = step + 1
        if done % log.every == 0 or done in (first + 1, config.steps):
            values |= {**world.memory_used(), **speed.take(), **run.ranks_now()}
        reporter.step(done, values, run.data.token)
        if done % config.eval_every == 0 and done < config.steps:
            with run.record.span("evaluation"):
                reporter.validation(done, *run.evaluate())
        checkpoints.after_step(done)


def train_step(run: TrainingRun, step: int, reporter: Reporter) -> dict[str, float]:
    """Do one step on this process's part of the batch; return what to report. Collective."""
    config = run.config.train
    with run.record.span("data"):
        batch = run.data.train_batch(config.seed, rank_slice(step, config.batch, *run.world.part))
    rate = learning_rate(run.config.optim, config.steps, step)
    loss, grad_norm, bad = run.step_on(batch, rate)
    if bad:
        turn_away(config.on_nonfinite, step, bad, reporter)
        run.record.end_step()  # its optimizer has not stepped
    return {"loss": loss, "grad_norm": grad_norm, "lr": rate}


def conclude(run: TrainingRun, reporter: Reporter) -> None:
    """Save the weights, print the table of bytes, a sample of text, and where things are.

    Collective. Gradients of the last step are still there.
    """
    config, world = run.config, run.world
    # Only the first process writes; the others need no folder, but a path to talk about.
    weights = (reporter.folder or Path(config.log.folder)) / FINISHED
    with writing(weights):
        run.save_weights(weights)
    title = f"Memory for the model, {config.shard.strategy} over {world.name}"
    reporter.console.print()
    reporter.console.print(bytes_table(title, run.bytes_rows(), world.noun))
    remark = run.keep_observed(reporter.folder)
    if remark:
        reporter.say(remark)
    if config.of_text and config.log.sample_bytes:
        say_sample(run.write_text(PROMPT, config.log.sample_bytes), reporter)
    if config.log.report:
        say_report(reporter)
    say_files(reporter)
