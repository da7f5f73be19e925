# SPDX-License-Identifier: Apache-2.0
"""The sentences of a run on either engine: settings, refused steps, sample, files written."""

from pathlib import Path

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.report import write_report
from fullshard.train.config import Config, resolve, to_toml
from fullshard.train.metrics import Reporter, new_run_folder, writing
from fullshard.train.run import TrainingRun, World
from fullshard.train.survival import folder_to_resume

__all__ = [
    "PROMPT",
    "NonFiniteError",
    "introduce",
    "open_folder",
    "say_files",
    "say_report",
    "say_sample",
    "turn_away",
]

PROMPT = b"def "  # what a sample of text begins with


class NonFiniteError(FullshardError, ArithmeticError):
    """A loss or gradient is infinite or NaN; the optimizer has not used it."""


def open_folder(config: Config, world: World) -> Path | None:
    """Make the run's folder on rank 0 and keep the settings there; None on the other ranks.

    One that is to go on is there already.
    """
    if not world.is_first:
        return None
    resumed = folder_to_resume(config)
    if resumed is not None:
        return resumed
    folder = new_run_folder(config.log.folder, config.run_name)
    with writing(folder / "config.toml"):
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


def introduce(run: TrainingRun, reporter: Reporter) -> None:
    """Print the settings that were chosen and what will roughly happen."""
    config, train, data = run.config, run.config.train, run.data
    usual = resolve(model=config.model.name)
    chosen = [
        f"{section}.{key}={value}"
        for section, values in vars(config).items()
        for key, value in vars(values).items()
        if value != getattr(getattr(usual, section), key)
    ]
    reporter.say(f"settings: {', '.join(chosen) or 'all as usual'}")
    tokens = train.batch * data.tokens_per_sample
    reporter.say(
        f"\n{config.run_name}: {run.parameters_numel:,} parameters ({train.dtype}, "
        f"{config.shard.strategy} over {run.world.where}); {data.describe()}.\n"
        f"{train.steps} steps of {tokens:,} {data.token}, about "
        f"{config.flops_per_token * tokens * train.steps / 1e12:,.1f} TFLOP in all; "
        f"validation every {train.eval_every} steps.\n"
    )


def turn_away(choice: str, step: int, where: str, reporter: Reporter) -> None:
    """Raise `NonFiniteError` for ``step`` (from 0) if ``choice`` is "stop", else say it is skipped.

    ``where`` names the ranks or devices, as in "rank 0, 3".
    """
    what = f"step {step + 1}: loss or gradient is not finite on {where}"
    if choice == "stop":
        raise NonFiniteError(
            f"{what}; stopped before the optimizer used it. A lower optim.lr or a longer "
            "optim.warmup_steps may help; train.on_nonfinite=skip leaves such steps out"
        )
    reporter.say(f"{what}; skipped on all ranks")


def say_sample(text: bytes, reporter: Reporter) -> None:
    """Print what a trained gpt has written."""
    encoding = reporter.console.encoding
    shown = text.decode("utf-8", errors="replace").encode(encoding, "replace").decode(encoding)
    shown = "".join(c if c.isprintable() or c == "\n" else " " for c in shown)
    reporter.say(f"\nA sample of what it writes after {PROMPT.decode()!r}:\n\n{shown}\n")


def say_report(reporter: Reporter) -> None:
    """Write the page of the run's record, and print its verdict; nothing without a folder."""
    if reporter.folder is None:
        return
    try:
        verdict, path = write_report(reporter.folder)
    except ConfigurationError as error:
        reporter.say(f"no report: {error}")
        return
    missing = "no page: it needs the extra report, as of pip install -e '.[report]'"
    reporter.say(f"{verdict}\n{missing if path is None else f'report: {path}'}")


def say_files(reporter: Reporter) -> None:
    """Print what the run's folder holds; nothing where there is none."""
    if reporter.folder is not None:
        names = ", ".join(sorted(path.name for path in reporter.folder.iterdir()))
        reporter.say(f"written to {reporter.folder}: {names}")
