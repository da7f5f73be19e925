# SPDX-License-Identifier: Apache-2.0
"""Saving and loading as both engines do it: who agrees on what, in which order.

An engine gives its ranks, the pieces of what it saves, and for a load a `Delivery`: what this rank
wants and where that goes. All else is here: one save at a time, the line of steps that a model was
trained along, memory for saves under way, the two passes of a load.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fullshard.checkpoint.background import Saving, save_in_background
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.format.stored import About, Ancestor
from fullshard.checkpoint.loading import Checkpoint, Loading, Want
from fullshard.checkpoint.planning import Plans
from fullshard.checkpoint.ranks import CheckpointRanks, agreed, from_first
from fullshard.checkpoint.runs.commit import (
    StepFolder,
    find_step,
    mark_verified,
    steps_in,
    steps_off_line,
)
from fullshard.checkpoint.runs.folder import Background, RunFolder
from fullshard.checkpoint.saving import write_step
from fullshard.checkpoint.shards import Piece
from fullshard.checkpoint.streaming import BLOCK_BYTES, Blocks, NewBlock, stream
from fullshard.core.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Content:
    """All that a rank has to save: its pieces, and what stands beside them.

    ``extra`` is the user's as it was given, by which retention rates the step; ``new_block`` makes
    host memory for an asynchronous save.
    """

    pieces: Sequence[Piece]
    about: About
    extra: Any = None
    new_block: NewBlock | None = None


@dataclass(frozen=True)
class Loaded:
    """A loaded step: everything beside what was loaded into.

    ``world`` is the number of ranks that saved it. ``missing``: tensors of the models that the step
    has not, ``unexpected``: those that only the step has; both are empty with ``strict``.
    ``newer``: steps of the run folder that follow the one that was loaded. The next save of what
    was loaded moves them aside. ``settings`` tells each setting of an optimizer that was changed
    by the load, or stayed although the step has another one, and ``converted`` the tensors whose
    kind of numbers was changed, as texts. ``state`` is the pytree, on JAX.
    """

    step: int
    extra: Any
    folder: Path
    world: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    newer: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    state: Any = field(default=None, repr=False)
    set_random_state: Callable[[], None] | None = field(default=None, repr=False)

    def restore_random_state(self) -> bool:
        """Let this rank's generators go on where those of the same rank were.

        False, and nothing is changed, if the step was saved on fewer ranks than this one's number,
        or by JAX, whose random keys are part of the state.
        """
        if self.set_random_state is None:
            return False
        self.set_random_state()
        return True


class Delivery(Protocol):
    """One rank's part of a load. Nothing of it can be seen before `finish`, if that is so."""

    @property
    def wants(self) -> Sequence[Want]:
        """All reads of this rank."""

    @property
    def is_whole(self) -> bool:
        """True if the ranks together read all of the step."""

    def look(self, part: Want, data: memoryview) -> None:
        """Take a part that is ``fresh``, or refuse one that must not be converted."""

    def receive(self, loading: Loading) -> None:
        """Take everything that is left."""

    def finish(self, checkpoint: Checkpoint, newer: tuple[int, ...]) -> Loaded:
        """Let the caller have it."""


Made = TypeVar("Made", bound=Delivery)


def check_step(step: Any) -> None:
    """Raise `ConfigurationError` unless ``step`` is a whole number from 0."""
    if type(step) is not int or not 0 <= step < 10**18:
        raise ConfigurationError(f"step is a whole number from 0, got {step!r}")


class SaveSession:
    """The memory of ranks that save together, from save to save. Methods are collective."""

    def __init__(self, ranks: CheckpointRanks):
        self.ranks = ranks
        self._plans = Plans()
        self._blocks = Blocks(3 * BLOCK_BYTES)
        self._aside_blocks: tuple[int, Blocks] | None = None
        self._pending: tuple[Saving, Any, Path] | None = None
        # By what was loaded or saved (a model), and by run folder.
        self._lines: weakref.WeakKeyDictionary[Any, dict[Path, Ancestor]] = (
            weakref.WeakKeyDictionary()
        )

    def settle(self) -> None:
        """Wait for a save that is under way. Raises its `CheckpointError` on all ranks, once."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        saving, owner, run = pending
        is_told = saving.is_told
        failure: Exception | None = None
        try:
            written = saving.written()
        except CheckpointError as error:
            failure = error
        else:
            self._note(owner, run, Ancestor(saving.step, written.generation))
        if failure is not None and set(self.ranks.share(b"told" if is_told else b"new")) != {
            b"told"
        }:
            raise failure

    def save(
        self,
        run: RunFolder,
        step: int,
        collect: Callable[[], Content],
        asynchronous: bool | Background,
        owner: Any,
    ) -> Saving:
        """Write one step of a run. ``owner`` is what is trained, by which lines are told apart.

        Raises `CheckpointError` or `ConfigurationError` on all ranks.
        """
        self.settle()
        content, failure = Content((), About(step)), None
        about = content.about
        try:
            content = collect()
            about = self._with_line(run, content, owner)
        except Exception as error:
            failure = error
        what = f"step {step} cannot be saved"
        plan = self._plans.plan(content.pieces, self.ranks, what, failure)
        if not asynchronous:
            feed = partial(stream, blocks=self._blocks)
            written = write_step(run, plan, about, self.ranks, feed)
            self._note(owner, run.path, Ancestor(step, written.generation))
            return Saving.finished(step, written)
        background = asynchronous if isinstance(asynchronous, Background) else run.background
        blocks = self._blocks_of(background, content.new_block)
        aside = self.ranks.duplicate(run.path, run.files)
        saving = save_in_background(run, plan, about, aside, blocks)
        self._pending = saving, owner, run.path
        return saving

    def _with_line(self, run: RunFolder, content: Content, owner: Any) -> About:
        about = content.about
        after = self._lines.get(owner, {}).get(run.path)
        metrics = {}
        if self.ranks.rank == 0:
            if run.keep is not None and run.keep.best:
                metrics = {run.keep.metric: run.keep.rating(content.extra)}
            off_line = steps_off_line(steps_in(run.files, run.path), about.step, after)
            if off_line and after is None:
                _warn_of(run.path, off_line, f"step {about.step} is saved, and nothing was loaded")
        return replace(about, after=after, metrics=metrics)

    def _blocks_of(self, background: Background, new_block: NewBlock | None) -> Blocks:
        """Host memory for an asynchronous save, the same as last time if the bound is."""
        most = background.host_memory_bytes
        if self._aside_blocks is None or self._aside_blocks[0] != most:
            self._aside_blocks = most, Blocks(most, new_block) if new_block else Blocks(most)
        return self._aside_blocks[1]

    def _note(self, owner: Any, run: Path, ancestor: Ancestor) -> None:
        self._lines.setdefault(owner, {})[run] = ancestor

    def load(
        self,
        run: RunFolder,
        step: int | None,
        prepare: Callable[[Checkpoint], Delivery],
        fallback: bool,
        owner: Any,
        if_any: bool = False,
    ) -> Loaded | None:
        """Load the newest complete step, or ``step``; with ``fallback`` the one before damage.

        A fallback, and newer steps, are warned of on rank 0. The run folder may also be a step's
        folder itself. Raises `CheckpointError` on all ranks: there is no such step, or it cannot be
        loaded; then nothing has changed. With ``if_any`` returns None if there is no step yet.
        """
        if if_any and step is None and not self._any_step(run):
            return None
        self.settle()
        steps = self._agreed_steps(run, step)
        newer: list[StepFolder] = []
        damaged: list[StepFolder] = []
        if step is not None:
            steps, newer = steps[:1], steps[1:]
            if fallback:
                steps = self._agreed_steps(run, step, older=True)
        while True:
            folder = steps.pop()
            try:
                delivery, checkpoint = self._load(folder, run, prepare)
            except CheckpointError as error:
                if not fallback or not steps or error.file is None:
                    raise
                damaged.append(folder)
                if self.ranks.rank == 0:
                    warnings.warn(
                        f"{error}\nfalling back to step {steps[-1].step}; the next save of what is "
                        f"loaded moves step {folder.step} into a folder {run.path / 'aside-N'}",
                        RuntimeWarning,
                        stacklevel=4,
                    )
                continue
            later = [each for each in newer if each.step > folder.step]
            if later and self.ranks.rank == 0:
                _warn_of(run.path, later, f"step {folder.step} is loaded")
            generation = checkpoint.manifest.generation
            self._note(owner, run.path, Ancestor(checkpoint.step, generation))
            later += [each for each in damaged if each.step > folder.step]
            return delivery.finish(checkpoint, tuple(sorted({each.step for each in later})))

    def _any_step(self, run: RunFolder) -> bool:
        """True if rank 0 sees a complete step. Collective; raises `CheckpointError` on all."""
        return from_first(
            self.ranks,
            f"cannot load a checkpoint of {run.path}",
            lambda: bool(run.newest() or (run.path / MANIFEST).is_file()),
        )

    def _agreed_steps(
        self, run: RunFolder, step: int | None, older: bool = False
    ) -> list[StepFolder]:
        """Rank 0's steps, oldest first: to the newest, or from (``older``: up to) ``step``."""

        def seen() -> list[list[Any]]:
            there = steps_in(run.files, run.path)
            if step is None and (run.path / MANIFEST).is_file() and not there:
                there = [StepFolder(0, 1, run.path)]
            else:
                wanted = find_step(run.files, run.path, step)
                if step is not None:
                    there = [s for s in there if (s <= wanted if older else s >= wanted)]
            return [[s.step, s.revision, os.fspath(s.path)] for s in there]

        listed = from_first(self.ranks, f"cannot load a checkpoint of {run.path}", seen)
        return [StepFolder(number, revision, Path(path)) for number, revision, path in listed]

    def _load(
        self, folder: StepFolder, run: RunFolder, prepare: Callable[[Checkpoint], Made]
    ) -> tuple[Made, Checkpoint]:
        """Read one step. See [Note: Verify, then deliver] in `fullshard.checkpoint.loading`."""
        what = f"cannot load {folder.path}"
        with agreed(self.ranks, what):
            checkpoint = Checkpoint(folder.path, run.files)
        first = self.ranks.broadcast(checkpoint.manifest.generation.encode()).decode()
        with ExitStack() as stack:
            with agreed(self.ranks, what):
                _check_same(checkpoint, first)
                delivery = prepare(checkpoint)
                loading = stack.enter_context(Loading(checkpoint, delivery.wants))
                loading.verify(delivery.look)
            with agreed(self.ranks, f"{what}, of which a part is loaded"):
                delivery.receive(loading)
        if self.ranks.rank == 0 and delivery.is_whole:
            mark_verified(run.files, folder.path)
        return delivery, checkpoint


def _warn_of(run: Path, steps: Sequence[StepFolder], why: str) -> None:
    shown = ", ".join(str(number) for number in sorted({folder.step for folder in steps})[:8])
    warnings.warn(
        f"{why}, and {run} has later ones ({shown}): the next save of what was loaded moves these "
        f"into a folder {run / 'aside-N'}, and deletes none of them",
        RuntimeWarning,
        stacklevel=5,
    )


def _check_same(checkpoint: Checkpoint, generation: str) -> None:
    if checkpoint.manifest.generation != generation:
        raise CheckpointError(
            f"{checkpoint.folder} is not the same here and on rank 0: a run folder must lie on a "
            "file system that all ranks share",
            file=str(checkpoint.folder),
        )
