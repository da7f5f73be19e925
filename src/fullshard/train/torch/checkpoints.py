# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on the torch engine: going on from one, and saving when it is time."""

from pathlib import Path

import torch

from fullshard.checkpoint import Files, steps_in
from fullshard.core.errors import ConfigurationError
from fullshard.torch import Keep, RunFolder, Saving, load_checkpoint, save_checkpoint
from fullshard.train.metrics import Reporter
from fullshard.train.survival import (
    CHECKPOINTS,
    COME_AGAIN,
    Clock,
    StopRequest,
    forget_after,
)
from fullshard.train.torch.setup import Run

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one run. All methods are collective."""

    def __init__(self, run: Run, folder: Path | None, reporter: Reporter, stop: StopRequest):
        config = run.config.checkpoint
        self._run = run
        self._reporter = reporter
        self._stop = stop
        self._clock = Clock(config)
        # Rank 0 knows the folder; the others write into it, too.
        path = run.world.shared_text(str(folder / CHECKPOINTS) if folder is not None else "")
        self._folder = RunFolder(path, keep=Keep(last=config.keep))
        self._saving: Saving | None = None

    @property
    def there(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        found = (
            bool(steps_in(Files(), Path(self._folder.path))) if self._run.world.is_first else False
        )
        flag = torch.tensor([float(found)], dtype=torch.float64, device=self._run.world.device)
        return bool(self._run.world.total(flag).item())

    def resume(self) -> int:
        """Load the newest step that is right; returns how many steps are done."""
        run = self._run
        loaded = load_checkpoint(self._folder, run.model, run.optimizer, fallback=True)
        same_ranks = loaded.world == run.world.size and loaded.restore_random_state()
        batch = run.config.train.batch
        position = int(loaded.extra["position"])
        if position != loaded.step * batch:
            raise ConfigurationError(
                f"{loaded.folder} was saved at sample {position}, which is no multiple of "
                f"train.batch={batch}: go on with the batch that it was trained with"
            )
        if self._reporter.folder is not None:
            forget_after(self._reporter.folder, loaded.step)
        others = "" if same_ranks else f", saved by {loaded.world} ranks"
        self._reporter.say(f"going on after step {loaded.step}, sample {position}{others}")
        return loaded.step

    def after_step(self, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""
        world = self._run.world
        due = self._clock.is_due(done) and world.is_first
        wishes = torch.tensor([float(due), float(self._stop.signal)], dtype=torch.float64)
        due_somewhere, stop = world.total(wishes.to(world.device)).tolist()
        if not due_somewhere and not stop:
            return
        self._save(done, at_once=bool(stop))
        if stop:
            self._reporter.say(f"signal received: step {done} is saved; go on with --resume")
            raise SystemExit(COME_AGAIN)

    def finish(self) -> None:
        """Wait for a save that is under way. Raises `CheckpointError` if it failed."""
        if self._saving is not None:
            self._saving.wait()

    def _save(self, done: int, at_once: bool) -> None:
        run = self._run
        self._clock.saved()
        if not self._is_finite():
            self._reporter.say(
                f"step {done}: parameters or optimizer state are not finite; not saved, and the "
                "checkpoints before it stay"
            )
            return
        self._saving = save_checkpoint(
            self._folder,
            run.model,
            run.optimizer,
            step=done,
            extra={"position": done * run.config.train.batch},
            asynchronous=run.config.checkpoint.asynchronous and not at_once,
        )

    def _is_finite(self) -> bool:
        """Whether all that would be saved is finite, on all ranks."""
        bad = torch.zeros(1, dtype=torch.float64, device=self._run.world.device)
        for param in self._run.model.parameters():
            state = self._run.optimizer.state.get(param, {})
            for value in (param, *state.values()):
                if isinstance(value, torch.Tensor):
                    local = getattr(value, "local", value).detach()
                    bad += not bool(torch.isfinite(local).all())
        return not bool(self._run.world.total(bad).item())
