# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, disks that are full, folders that cannot be written, at every point of a save.

``FULLSHARD_TRIALS=full`` dies before and after every operation, otherwise at every fourth.
"""

import contextlib
import errno
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.checkpoint_cases import (
    FaultyFiles,
    ThreadRanks,
    arrays,
    assert_holds,
    names_in,
    new_world,
    run_ranks,
    save_spans,
    spans_of,
)
from support.limits import PROCESS_S
from support.sampling import FULL

from fullshard.checkpoint import open_checkpoint, steps_in
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.saving import save
from fullshard.core.errors import CheckpointError


@pytest.mark.long
def test_killed_before_and_after_every_operation(tmp_path):
    script = Path(__file__).parents[1] / "support" / "checkpoint_crashes.py"
    command = [sys.executable, str(script), str(tmp_path), "1" if FULL else "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    print(report)
    assert report["broken"] == []
    assert report["cases"] >= (100 if FULL else 25)
    assert set(report["left"]) == {"old step", "new step"}


def failing_at(rank, place, code):
    """A file system per rank; that of ``rank`` fails at its ``place``-th operation."""

    def watch(op, number, path):
        if number == place:
            raise OSError(code, "made to fail", str(path))

    return lambda each: FaultyFiles(watch if each == rank else lambda *_: None)


def save_with(run, files_of, step=2, keep=None):
    def work(ranks):
        pieces = spans_of(arrays(step), ranks.rank, ranks.size)
        return save(run, pieces, About(step), ranks, files_of(ranks.rank), keep)

    return run_ranks(2, work)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_operation_that_fails_fails_the_save_on_all_ranks_and_leaves_the_old_step(
    tmp_path, rank
):
    save_spans(tmp_path, arrays(1), 2, step=1)
    counted = [FaultyFiles(lambda *_: None) for _ in range(2)]
    save_spans(tmp_path / "count", arrays(1), 2, step=1)
    save_with(tmp_path / "count", counted.__getitem__)
    place = 0
    for place, op in enumerate(counted[rank].calls):
        results = save_with(tmp_path, failing_at(rank, place, errno.EIO))
        errors = [each for each in results if isinstance(each, Exception)]
        steps = [each.step for each in steps_in(Files(), tmp_path)]
        if not errors:  # what only cleans up may fail
            assert op == "names", (place, op)
            assert steps == [1, 2]
        else:
            assert all(isinstance(each, CheckpointError) for each in errors), errors
            assert len(errors) == 2, (place, op, results)
            assert "step 2 was not saved" in str(errors[0])
            # Where the last operation of all fails the step may be there, and it is whole.
            assert steps == ([1, 2] if place == len(counted[0].calls) - 1 else [1])
        for each in steps:
            assert_holds(tmp_path, arrays(each), step=each)
        for each in list(tmp_path.glob("step-000000000002*")):
            for file in each.iterdir():
                file.unlink()
            each.rmdir()
    assert place > 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_at_any_byte(tmp_path, rank):
    save_spans(tmp_path, arrays(1), 2, step=1)

    class FullDisk(Files):
        def __init__(self, left):
            self.left = left

        def write(self, file, data):
            fits = data[: self.left]
            self.left -= fits.nbytes
            super().write(file, fits)
            if fits.nbytes < data.nbytes:
                raise OSError(errno.ENOSPC, "No space left on device", str(file.path))

    for left in (0, 1, 4095, 4096, 4097, 4500, 5000, 7000, 10**6):
        disks = {rank: FullDisk(left), 1 - rank: FullDisk(10**9)}
        results = save_with(tmp_path, disks.__getitem__)
        written = [isinstance(each, Path) for each in results]
        assert all(written) or not any(written)
        if not any(written):
            assert "No space left on device" in str(results[0])
            assert "No space left on device" in str(results[1])
            assert_holds(tmp_path, arrays(1))
            assert names_in(tmp_path) == ["step-000000000001"]
    assert all(written)  # the last one fitted


def test_a_slow_disk_is_waited_for(tmp_path):
    @contextlib.contextmanager
    def slow(op, number, path):
        time.sleep(0.02)
        yield

    results = save_with(tmp_path, lambda rank: FaultyFiles(slow if rank else lambda *_: None))
    assert all(isinstance(each, Path) for each in results)
    assert_holds(tmp_path, arrays(2))


@pytest.mark.parametrize("call", range(6))
def test_a_rank_that_dies_in_a_collective_lets_the_other_end(tmp_path, call):
    save_spans(tmp_path, arrays(1), 2, step=1)
    world = new_world(2)
    calls = iter(range(100))

    class Dying(ThreadRanks):
        def _meet(self, plain, data):
            if next(calls) == call:
                world["barrier"].abort()  # as a connection is closed
                raise SystemExit
            return plain(data)

        def gather(self, data):
            return self._meet(super().gather, data)

        def broadcast(self, data):
            return self._meet(super().broadcast, data)

        def share(self, data):
            return self._meet(super().share, data)

    ends = {}

    def run(kind, rank):
        try:
            pieces = spans_of(arrays(2), rank, 2)
            ends[rank] = save(tmp_path, pieces, About(2), kind(rank, world))
        except (Exception, SystemExit) as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=each) for each in ((ThreadRanks, 0), (Dying, 1))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert isinstance(ends[1], SystemExit)
    assert isinstance(ends[0], Exception)
    newest = open_checkpoint(tmp_path)
    assert_holds(newest, arrays(newest.step))
