# SPDX-License-Identifier: Apache-2.0
"""The output of a run on either engine: progress bar, sentences, metrics.jsonl, closing table."""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.core.text import bytes_text
from fullshard.report import write_report
from fullshard.train.config import resolve
from fullshard.train.loggers import Tell
from fullshard.train.run import BytesRow, TrainingRun, World

_GIB = 2**30
PROMPT = b"def "  # what a sample of text begins with
_AHEAD = 0.05  # of a step: what ranks wait more than the slowest does is worth a word


class RunFolderError(FullshardError, OSError):
    """A file of the run cannot be written: the disk is full, or may not be written to."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `RunFolderError` where ``path`` cannot be written, in place of a bare `OSError`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"cannot write {str(path)!r}: {error.strerror or error}; free space there, or set "
            "log.folder to a place with more (a run keeps its weights, 4 bytes a parameter in "
            "float32)"
        ) from error


def new_run_folder(folder: str, name: str) -> Path:
    """Make and return a folder that did not exist: ``name``, or ``name-2``, ``name-3``, ..."""
    number = 1
    while True:
        path = Path(folder, name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            if not os.path.lexists(path):  # then a link above it exists, and leads nowhere
                raise ConfigurationError(
                    f"cannot make the run folder {str(path)!r}: a link ends nowhere; set log.folder"
                ) from error
            number += 1
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the run folder {str(path)!r}: {error.strerror}; set log.folder"
            ) from error
        else:
            return path


@dataclass
class Speed:
    """Turns counted tokens into rates. ``flops_per_token`` and ``peak_flops`` (of one device) are
    for forward and backward; a ``peak_flops`` of None means unknown, and no MFU is shown.
    """

    flops_per_token: float
    ranks: int
    peak_flops: float | None
    tokens: int = 0
    seconds: float = 0.0
    _since: float | None = None

    def start(self) -> None:
        """Begin a step's time."""
        self._since = time.perf_counter()

    def stop(self, tokens: int) -> float:
        """End a step's time, in which all ranks together processed ``tokens``; return seconds."""
        assert self._since is not None
        seconds = time.perf_counter() - self._since
        self.seconds += seconds
        self.tokens += tokens
        return seconds

    def take(self) -> dict[str, float]:
        """Return rates since the last call, of all ranks; MFU is the share of their peak."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        self.tokens, self.seconds = 0, 0.0
        rates = {"tokens_per_s": rate, "tflops_per_s": rate * self.flops_per_token / 1e12}
        if self.peak_flops is not None:
            rates["mfu"] = rate * self.flops_per_token / (self.peak_flops * self.ranks)
        return rates


class Reporter:
    """Rank 0's voice: bar, lines and ``metrics.jsonl``. On other ranks every call does nothing."""

    def __init__(self, world: World, folder: Path | None, steps: int) -> None:
        self.folder = folder
        self.listeners: Sequence[Tell] = ()
        self.console: Console = Console(quiet=not world.is_first, soft_wrap=True, highlight=False)
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}", markup=False),
            console=self.console,
            # A file or a pipe gets the lines only.
            disable=not (world.is_first and self.console.is_terminal),
        )
        self._task = self._progress.add_task("", total=steps, now="")

    def __enter__(self) -> "Reporter":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, steps: int = 1) -> None:
        """Move the bar on by ``steps``."""
        self._progress.advance(self._task, steps)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, markup=False)

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``; its time is in seconds since 1970."""
        if self.folder is None:
            return
        # JSON has no NaN; null stands for it.
        plain = {key: value if abs(value) < float("inf") else None for key, value in values.items()}
        line = json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **plain})
        path = self.folder / "metrics.jsonl"
        with writing(path), open(path, "a", encoding="utf-8") as lines:
            lines.write(line + "\n")
        for tell in self.listeners:
            tell(kind, step, values)

    def step(self, step: int, values: Mapping[str, float], token: str = "tokens") -> None:
        """Record a step, and show it if memory is told; ``token`` names what is counted."""
        self.record("train", step, values)
        if "memory_bytes" not in values:
            return
        used, total = values["memory_bytes"], values["memory_total_bytes"]
        parts = [
            f"step {step}",
            f"loss {values['loss']:.4f}",
            f"grad_norm {values['grad_norm']:.3f}",
            f"lr {values['lr']:.2e}",
            f"memory {used / _GIB:.2f} GiB ({used / total:.1%})",
            f"{values['tokens_per_s']:,.0f} {token}/s",
            f"{values['tflops_per_s']:.3g} TFLOP/s",
        ]
        if "mfu" in values:
            parts.append(f"MFU {values['mfu']:.1%}")
        now = ranks_text(values)
        self._progress.update(self._task, now=now)
        self.say("  ".join([*parts, now] if now else parts))

    def validation(self, step: int, loss: float, accuracy: float) -> None:
        """Show and record one validation."""
        self.say(f"step {step}  validation loss {loss:.4f}  accuracy {accuracy:.1%}")
        self.record("validation", step, {"loss": loss, "accuracy": accuracy})


def ranks_text(values: Mapping[str, float]) -> str:
    """Say what `TrainingRun.ranks_now` tells, where ranks differ or wait."""
    least, most = values.get("memory_least_bytes", 0), values.get("memory_most_bytes", 0)
    parts = []
    if most > 1.01 * least:
        parts.append(f"ranks {least / _GIB:.2f} to {most / _GIB:.2f} GiB")
    if "exposed_share" in values:
        parts.append(f"waiting {values['exposed_share']:.0%}")
        ahead = values["ahead_of_slowest_share"]
        if ahead > _AHEAD:
            parts.append(f"slowest rank {values['slowest_rank']} by {ahead:.0%}")
    return "  ".join(parts)


def bytes_table(title: str, rows: Sequence[BytesRow], noun: str = "rank") -> Table:
    """Return the table that a run ends with: memory of each ``noun``, and of one process alone."""
    table = Table(title=title)
    table.add_column("")
    table.add_column(f"each {noun}", justify="right")
    table.add_column("one unsharded process", justify="right")
    table.add_column("share", justify="right")
    for name, mine, whole in rows:
        share = f"{mine / whole:.1%}" if whole else ""
        style = "bold" if name.startswith("peak") else None
        without = "" if whole is None else bytes_text(whole)
        table.add_row(name, bytes_text(mine), without, share, style=style)
    return table


# -- sentences -------------------------------------------------------------------------------------


class NonFiniteError(FullshardError, ArithmeticError):
    """A loss or gradient is infinite or NaN; the optimizer has not used it."""


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
    """Raise `NonFiniteError` for ``step`` if ``choice`` is "stop", else say it is skipped."""
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
