# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on either engine: when to save and to leave, and where a run goes on."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fullshard.checkpoint import Files, Keep, RunFolder, Saving, steps_in
from fullshard.train.config import Config
from fullshard.train.metrics import Reporter
from fullshard.train.survival import (
    COME_AGAIN,
    FoundStep,
    SaveClock,
    StopRequest,
    check_position,
    forget_after,
)

__all__ = ["RunCheckpoints"]


class RunCheckpoints(ABC):
    """The checkpoints of one run in the folder ``path``. All methods are collective.

    An engine adds how it loads and saves, and how its ranks agree. ``first`` is true on the rank
    that looks at the folder and at the clock for all.
    """

    def __init__(
        self, config: Config, path: str, first: bool, reporter: Reporter, stop: StopRequest
    ):
        self._config = config
        self._first = first
        self._reporter = reporter
        self._stop = stop
        self._clock = SaveClock(config.checkpoint)
        self._folder = RunFolder(path, keep=Keep(last=config.checkpoint.keep))
        self._saving: Saving | None = None

    @abstractmethod
    def _somewhere(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each of ``flags`` if it is true on any rank."""

    @property
    def there(self) -> bool:
        """True if there is a checkpoint to go on from."""
        found = self._first and bool(steps_in(Files(), Path(self._folder.path)))
        return any(self._somewhere(found))

    def finish(self) -> None:
        """Wait for a save that is under way. Raises `CheckpointError` if it failed."""
        if self._saving is not None:
            self._saving.wait()

    def _extra(self, done: int) -> dict[str, Any]:
        return {"position": done * self._config.train.batch}

    def _go_on(self, loaded: FoundStep, others: str = "") -> None:
        """Check and tell where the run goes on, and forget what was told of later steps."""
        position = check_position(loaded, self._config.train.batch)
        if self._reporter.folder is not None:
            forget_after(self._reporter.folder, loaded.step)
        self._reporter.say(f"going on after step {loaded.step}, sample {position}{others}")

    def _after_step(
        self, done: int, is_finite: Callable[[], bool], save: Callable[[bool], Saving]
    ) -> None:
        """Save by ``save(aside)`` if it is time, or if a signal wants it; leave after a signal.

        ``aside`` is false if the save must be complete at once.
        """
        due = self._first and self._clock.is_due(done)
        due, stop = self._somewhere(due, bool(self._stop.signal))
        if not due and not stop:
            return
        self._clock.saved()
        saved = is_finite()
        if saved:
            self._saving = save(self._config.checkpoint.asynchronous and not stop)
        else:
            self._reporter.say(
                f"step {done}: parameters or optimizer state are not finite; not saved, and the "
                "checkpoints before it stay"
            )
        if stop:
            what = f"step {done} is saved" if saved else f"step {done} is not saved"
            self._reporter.say(f"signal received: {what}; go on with --resume")
            raise SystemExit(COME_AGAIN)
