# SPDX-License-Identifier: Apache-2.0
"""Files are read in long runs, fresh memory once, and with few of them open at a time."""

import threading
from collections import Counter

import numpy
import pytest
from support.checkpoint_cases import (
    ArraySource,
    FaultyFiles,
    arrays,
    run_ranks,
    save_spans,
    whole_box,
)

from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.loading import Checkpoint, Loading, Want, open_checkpoint
from fullshard.checkpoint.reading import streams
from fullshard.checkpoint.reading.streams import in_streams
from fullshard.checkpoint.saving import save
from fullshard.checkpoint.shards import Piece
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(streams, "thread_count", lambda: 3)


def test_each_thread_works_in_order_on_what_follows_each_other(three_threads):
    worked = {}

    def work(item):
        worked.setdefault(threading.current_thread(), []).append(item)
        return -item

    sizes = [streams.RUN_BYTES // 4] * 40
    assert sorted(in_streams(work, range(40), sizes)) == sorted(-item for item in range(40))
    assert threading.main_thread() not in worked
    for items in worked.values():
        runs = [items[at : at + 4] for at in range(0, len(items), 4)]
        assert all(run == list(range(run[0], run[0] + 4)) for run in runs)
        assert items == sorted(items)


def test_few_results_wait_for_the_caller(three_threads):
    begun, most = Counter(), 0
    lock = threading.Lock()

    def work(item):
        with lock:
            begun["items"] += 1
        return item

    for taken, _ in enumerate(in_streams(work, range(60), [streams.RUN_BYTES] * 60), 1):
        most = max(most, begun["items"] - taken)
    assert most <= 6  # one under way and one handed over by each thread


@pytest.mark.parametrize("first", [0, 7])
def test_the_first_failure_ends_it(three_threads, first):
    done = []

    def work(item):
        if item >= first:
            raise CheckpointError(f"item {item}")
        done.append(item)

    with pytest.raises(CheckpointError, match="item"):
        list(in_streams(work, range(1000), [streams.RUN_BYTES] * 1000))
    assert set(done) <= set(range(first))
    assert not [each for each in threading.enumerate() if each.name.startswith("fullshard-read")]


def test_a_caller_that_goes_away_leaves_no_thread(three_threads):
    results = in_streams(lambda item: item, range(100), [streams.RUN_BYTES] * 100)
    next(results)
    results.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("fullshard-read")]


def test_fresh_memory_is_filled_in_the_first_pass(tmp_path):
    whole = arrays()
    save_spans(tmp_path, whole, 1, step=1)
    files = FaultyFiles(lambda *_: None)
    checkpoint = Checkpoint(open_checkpoint(tmp_path).folder, files)
    targets = {name: numpy.full(array.nbytes, 7, "u1") for name, (array, _) in whole.items()}
    wants = [
        Want(name, (whole_box(array.shape),), targets[name].data, name, name.startswith("optim"))
        for name, (array, _) in whole.items()
        if array.size
    ]
    fresh = {want.name for want in wants if want.fresh}
    assert fresh
    assert fresh < {want.name for want in wants}
    with Loading(checkpoint, wants, kept_bytes=0) as loading:
        given = []
        loading.verify(lambda part, _: given.append(part.name))
        assert set(given) == fresh
        for name, (array, _) in whole.items():
            expected = array.tobytes() if name in fresh else b"\x07" * array.nbytes
            assert targets[name].tobytes() == expected
        before = files.calls.count("read_into")
        left = {part.name for part, _ in loading.deliver()}
        assert left == {want.name for want in wants} - fresh
        assert files.calls.count("read_into") - before == len(left)
    for name, (array, _) in whole.items():
        assert targets[name].tobytes() == array.tobytes()


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    class Counting(Files):
        held, most = 0, 0

        def open(self, path):
            self.held += 1
            self.most = max(self.most, self.held)
            return super().open(path)

        def close(self, file):
            self.held -= 1
            super().close(file)

    monkeypatch.setattr("fullshard.checkpoint.shards._MOST_OPEN", 2)
    array = numpy.arange(12, dtype="<f4")

    def work(ranks):
        box = Box((2 * ranks.rank,), (2,))
        source = ArraySource(array[2 * ranks.rank :][:2])
        return save(tmp_path, [Piece("w", (12,), "F32", (box,), source)], About(1), ranks)

    run_ranks(6, work)
    files = Counting()
    checkpoint = Checkpoint(open_checkpoint(tmp_path).folder, files)
    assert len(checkpoint.manifest.files) == 6
    assert checkpoint.read("w").tobytes() == array.tobytes()
    checkpoint.verify()
    assert files.held == 0
    assert files.most <= 3  # two of the reader, and the manifest
