# SPDX-License-Identifier: Apache-2.0
"""Random histories of a run folder beside a model in plain Python: what the rules keep is there.

``FULLSHARD_TRIALS=full`` runs 2,000 histories, otherwise 20.
"""

import errno
import random
import shutil
import warnings
from pathlib import Path

import numpy
import pytest
from support.checkpoint_cases import ArraySource, FaultyFiles, whole_box
from support.sampling import FULL

from fullshard.checkpoint import Checkpoint, Files, Keep, RunFolder, SoloRanks, steps_in
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.format.values import to_json
from fullshard.checkpoint.session import Content, Loaded, SaveSession
from fullshard.checkpoint.shards import Piece
from fullshard.core.errors import CheckpointError

HISTORIES = 2000 if FULL else 20
OPERATIONS = 14


class Trained:
    """Stands for a model: what is loaded and saved is told apart by it."""


class WholeStep:
    """A load that wants nothing; with ``is_whole`` it counts as one that has verified the step."""

    wants = ()

    def __init__(self, is_whole):
        self.is_whole = is_whole

    def look(self, part, data):
        raise AssertionError("nothing is wanted")

    def receive(self, loading):
        pass

    def finish(self, checkpoint, newer):
        folder = checkpoint.folder
        return Loaded(checkpoint.step, checkpoint.extra, folder, 1, newer=newer)


class Process:
    """A process that saves: its session, and what it trains."""

    def __init__(self, run, keep):
        self.run, self.keep = run, keep
        self.session, self.model = SaveSession(SoloRanks()), Trained()

    def save(self, step, tag, metric, files):
        array = numpy.full(3, tag, "<i8")
        piece = Piece("w", array.shape, "I64", (whole_box(array.shape),), ArraySource(array))
        extra = {"tag": tag, "loss": metric}
        about = About(step, extra=to_json(extra))
        folder = RunFolder(self.run, self.keep, files=files)
        self.session.save(folder, step, lambda: Content([piece], about, extra), False, self.model)

    def load(self, step, is_whole):
        folder = RunFolder(self.run, self.keep)
        return self.session.load(
            folder, step, lambda checkpoint: WholeStep(is_whole), False, self.model
        )


class Model:
    """The rules in plain Python. An entry of the line is (step, tag); the last one is newest."""

    def __init__(self, keep):
        self.keep = keep
        self.line, self.aside = [], set()
        self.metric, self.verified = {}, set()
        self.after = None  # the step that is trained on

    def saved(self, step, tag):
        """The line and what is aside after a save of ``step``, before and after retention."""
        if self.after is None or step < self.after:
            leads = [entry for entry in self.line if entry[0] < step]
        else:
            leads = [entry for entry in self.line if entry[0] <= self.after]
        aside = self.aside | {tag for entry, tag in self.line if (entry, tag) not in leads}
        line = [*leads, (step, tag)]
        return line, self._kept(line), aside

    def _kept(self, line):
        if self.keep is None:
            return list(line)
        last_of = dict(line)  # of each step its last save
        steps = sorted(last_of)
        stay = set(steps[-self.keep.last :])
        if self.keep.every:
            stay |= {step for step in steps if step % self.keep.every == 0}
        if self.keep.best:
            ranked = sorted(steps, key=lambda step: (self.metric[last_of[step]], -step))
            stay |= set(ranked[: self.keep.best])
        kept = [(step, tag) for step, tag in line if step in stay and last_of[step] == tag]
        verified = [entry for entry in line if entry[1] in self.verified]
        kept += [entry for entry in verified[-1:] if entry not in kept]
        return sorted(kept, key=line.index)


def tags_in(folder):
    """Step and tag of every step of a folder, each read and verified."""
    entries = []
    for step in steps_in(Files(), folder):
        checkpoint = Checkpoint(step.path)
        tag = checkpoint.extra["tag"]
        assert checkpoint.read("w").tolist() == [tag] * 3
        entries.append((step.step, tag))
    return entries


def tags_aside(run):
    return {tag for folder in sorted(run.glob("aside-*")) for _, tag in tags_in(folder)}


def dying_at(place, code):
    """Files of which every operation from ``place`` on fails; with no ``code`` like a kill."""

    def watch(op, number, path):
        if number >= place:
            raise OSError(code, "No space left on device") if code else KeyboardInterrupt

    return FaultyFiles(watch)


class History:
    def __init__(self, root, seed):
        self.draw = random.Random(seed)
        self.run, self.archive = root / "run", root / "archive"
        self.run.mkdir(parents=True)
        self.archive.mkdir()
        keeps = [
            None,
            Keep(last=1),
            Keep(last=2, every=4),
            Keep(last=1, best=2, metric="loss"),
        ]
        self.keep = self.draw.choice(keeps)
        self.model = Model(self.keep)
        self.process = Process(self.run, self.keep)
        self.archived, self.tag = {}, 0

    def save(self, files=None, interrupted=False):
        newest = self.model.line[-1][0] if self.model.line else 0
        base = newest if self.model.after is None else self.model.after
        step = max(0, base + self.draw.choice([1, 1, 1, 2, 3, 0, -1, -3]))
        self.tag += 1
        self.model.metric[self.tag] = float(self.draw.randrange(9))
        line, kept, aside = self.model.saved(step, self.tag)
        known = {tag for _, tag in self.model.line} | self.model.aside
        try:
            self.process.save(step, self.tag, self.model.metric[self.tag], files or Files())
        except (CheckpointError, KeyboardInterrupt):
            assert interrupted
        there, put_aside = tags_in(self.run), tags_aside(self.run)
        if (step, self.tag) in there:
            assert set(kept) <= set(there) <= set(line), "what the rules keep is gone"
            assert put_aside == aside
            if not interrupted:
                assert there == kept
                self.model.after = step
        else:
            assert interrupted
            assert {tag for _, tag in there} | put_aside == known
        self.model.line, self.model.aside = there, put_aside

    def go_back(self):
        if self.model.line:
            step, _ = self.draw.choice(self.model.line)
            tag = dict(self.model.line)[step]
            is_whole = self.draw.random() < 0.3
            loaded = self.process.load(step, is_whole)
            assert loaded.extra["tag"] == tag
            assert loaded.newer == tuple(sorted({s for s, _ in self.model.line if s > step}))
            self.model.verified |= {tag} if is_whole else set()
            self.model.after = step

    def resume(self):
        if self.model.line:
            assert self.process.load(None, False).extra["tag"] == self.model.line[-1][1]
            self.model.after = self.model.line[-1][0]

    def kill(self):
        self.save(dying_at(self.draw.randrange(40), None), interrupted=True)
        self.restart()

    def full_disk(self):
        self.save(dying_at(self.draw.randrange(40), errno.ENOSPC), interrupted=True)
        self.restart()

    def restart(self):
        self.process = Process(self.run, self.keep)
        self.model.after = None

    def move(self):
        """A user moves a step to an archive, and perhaps leaves a link in its place."""
        steps = steps_in(Files(), self.run)
        if not steps:
            return
        folder = self.draw.choice(steps)
        if folder.path.is_symlink():
            return
        target = self.archive / f"{len(self.archived)}"
        self.archived[target] = Checkpoint(folder.path).extra["tag"]
        folder.path.rename(target)
        if self.draw.random() < 0.7:
            folder.path.symlink_to(target)
        self.model.line = tags_in(self.run)

    def link(self):
        """A link that is named like what is cleaned away."""
        if self.archived:
            name = f".{self.draw.choice(['trash', 'staging'])}-{self.draw.randrange(16**31):032x}"
            (self.run / name).symlink_to(self.draw.choice(list(self.archived)))

    def second_run(self):
        class InUse(Files):
            def lock(self, path, text):
                raise BlockingIOError(errno.EAGAIN, "it is locked", str(path))

        before = sorted(path.name for path in self.run.iterdir())
        if (self.run / ".lock").exists():
            (self.run / ".lock").unlink()  # this process has it: let it ask again
            with pytest.raises(CheckpointError, match="is in use"):
                Process(self.run, None).save(10**6, 0, 0.0, InUse())
            (self.run / ".lock").touch()
            assert sorted(path.name for path in self.run.iterdir()) == before

    def play(self):
        others = (self.go_back, self.go_back, self.resume, self.restart, self.kill)
        others += (self.full_disk, self.move, self.link, self.second_run)
        for _ in range(OPERATIONS):
            self.save() if self.draw.random() < 0.5 else self.draw.choice(others)()
            assert tags_in(self.run) == self.model.line
            assert tags_aside(self.run) == self.model.aside
            for target, tag in self.archived.items():
                assert Checkpoint(target).extra["tag"] == tag


@pytest.mark.long
@pytest.mark.timeout(3600 if FULL else 300)
def test_nothing_that_the_rules_keep_is_ever_gone(tmp_path):
    for seed in range(HISTORIES):
        root = tmp_path / str(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                History(Path(root), seed).play()
            except BaseException as error:
                error.add_note(f"history {seed}")
                raise
        shutil.rmtree(root)
