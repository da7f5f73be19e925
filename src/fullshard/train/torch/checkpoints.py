# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run on the torch engine: going on from one, and saving when it is time."""

from pathlib import Path

import torch

from fullshard.checkpoint import Saving
from fullshard.torch import load_checkpoint, save_checkpoint
from fullshard.train.metrics import Reporter
from fullshard.train.run_checkpoints import RunCheckpoints
from fullshard.train.survival import CHECKPOINTS, StopRequest
from fullshard.train.torch.setup import TorchRun

__all__ = ["ModelCheckpoints"]


class ModelCheckpoints(RunCheckpoints):
    """The checkpoints of one run. All methods are collective."""

    def __init__(self, run: TorchRun, folder: Path | None, reporter: Reporter, stop: StopRequest):
        self._run = run
        # Rank 0 knows the folder; the others write into it, too.
        path = run.world.shared_text(str(folder / CHECKPOINTS) if folder is not None else "")
        super().__init__(run.config, path, run.world.is_first, reporter, stop)

    def resume(self) -> int:
        """Load the newest step that is right; returns how many steps are done."""
        run = self._run
        loaded = load_checkpoint(self._folder, run.model, run.optimizer, fallback=True)
        same_ranks = loaded.world == run.world.size and loaded.restore_random_state()
        self._go_on(loaded, "" if same_ranks else f", saved by {loaded.world} ranks")
        return loaded.step

    def after_step(self, done: int) -> None:
        """Save if it is time, or if a signal wants it; then leave with `SystemExit`."""
        self._after_step(done, self._is_finite, lambda aside: self._save(done, aside))

    def _save(self, done: int, aside: bool) -> Saving:
        run = self._run
        return save_checkpoint(
            self._folder,
            run.model,
            run.optimizer,
            step=done,
            extra=self._extra(done),
            asynchronous=aside,
        )

    def _somewhere(self, *flags: bool) -> tuple[bool, ...]:
        world = self._run.world
        told = torch.tensor(flags, dtype=torch.float64, device=world.device)
        return tuple(bool(each) for each in world.total(told).tolist())

    def _is_finite(self) -> bool:
        bad = False
        for param in self._run.model.parameters():
            state = self._run.optimizer.state.get(param, {})
            for value in (param, *state.values()):
                if isinstance(value, torch.Tensor):
                    local = getattr(value, "local", value).detach()
                    bad = bad or not bool(torch.isfinite(local).all())
        return not any(self._somewhere(bad))
