# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: when to save and to leave, and where a run goes on."""

from pathlib import Path

from fullshard.checkpoint import Files, Keep, RunFolder, Saving, steps_in
from fullshard.core.errors import ConfigurationError
from fullshard.train.metrics import Reporter
from fullshard.train.run import TrainingRun
from fullshard.train.signals import COME_AGAIN, StopRequest
from fullshard.train.survival import CHECKPOINTS, SaveClock, forget_after

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """The checkpoints of one run, below ``folder``, which its first process knows.

    All methods are collective. That process looks at the folder and at the clock for all.
    """

    def __init__(
        self, run: TrainingRun, folder: Path | None, reporter: Reporter, stop: StopRequest
    ):
        self._run = run
        self._reporter = reporter
        self._stop = stop
        self._clock = SaveClock(run.config.checkpoint)
        path = run.world.shared_text(str(folder / CHECKPOINTS) if folder is not None else "")
        self._folder = RunFolder(path, keep=Keep(last=run.config.checkpoint.keep))
        self._saving: Saving | None = None

    def resume(self) -> int:
        """Load the newest step that is right, if there is one; return how many steps are done.

        Raises `ConfigurationError` if steps of another batch lead there.
        """
        world, batch = self._run.world, self._run.config.train.batch
        there = world.is_first and bool(steps_in(Files(), Path(self._folder.path)))
        if not any(world.somewhere(there)):
            return 0
        loaded, note = self._run.load_step(self._folder)
        position = int(loaded.extra["position"])
        if position != loaded.step * batch:
            raise ConfigurationError(
                f"{loaded.folder} was saved at sample {position}, which is no multiple of "
                f"train.batch={batch}: go on with the batch that it was trained with"
            )
        if self._reporter.folder is not None:
            forget_after(self._reporter.folder, loaded.step)
        self._reporter.say(f"going on after step {loaded.step}, sample {position}{note}")
        return loaded.step

    def after_step(self, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""
        run = self._run
        due = run.world.is_first and self._clock.is_due(done)
        due, stop = run.world.somewhere(due, bool(self._stop.signal))
        if not due and not stop:
            return
        self._clock.saved()
        with run.record.span("checkpoint"):
            saved = run.is_finite()
            if saved:
                aside = run.config.checkpoint.asynchronous and not stop
                extra = {"position": done * run.config.train.batch}
                self._saving = run.save_step(self._folder, done, extra, aside)
        if not saved:
            self._reporter.say(
                f"step {done}: parameters or optimizer state are not finite; not saved, and the "
                "checkpoints before it stay"
            )
        if stop:
            what = f"step {done} is saved" if saved else f"step {done} is not saved"
            self._reporter.say(f"signal received: {what}; go on with --resume")
            raise SystemExit(COME_AGAIN)

    def finish(self) -> None:
        """Wait for a save that is under way. Raises `CheckpointError` if it failed."""
        if self._saving is not None:
            self._saving.wait()
