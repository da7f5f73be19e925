# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: newest, retention, marks of verification, left-overs; saving aside."""

import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from unittest.mock import Mock

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_cases import (
    ArraySource,
    FaultyFiles,
    arrays,
    assert_holds,
    names_in,
    run_ranks,
    save_spans,
    spans_of,
    whole_box,
)
from support.limits import PEERS_S

from fullshard.checkpoint import (
    Background,
    Keep,
    Saving,
    SoloRanks,
    StepFolder,
    open_checkpoint,
    planning,
    steps_in,
)
from fullshard.checkpoint.background import save_in_background
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About, Ancestor
from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.checkpoint.planning import Plans
from fullshard.checkpoint.ranks import FolderRanks
from fullshard.checkpoint.runs.folder import RunFolder
from fullshard.checkpoint.runs.retention import apply_retention, steps_to_remove
from fullshard.checkpoint.saving import WrittenStep, save, versions_of
from fullshard.checkpoint.shards import Piece
from fullshard.checkpoint.streaming import BLOCK_BYTES, Blocks
from fullshard.core.errors import CheckpointError, ConfigurationError

FILES = Files()


def test_the_newest_complete_step_is_taken_and_nothing_else(tmp_path):
    with pytest.raises(CheckpointError, match=r"no complete .* in .*: there is no such folder"):
        open_checkpoint(tmp_path / "run")
    for step in (5, 30, 200):
        save_spans(tmp_path, arrays(step), 1, step)
    for name in ("step-000000000900", ".staging-" + "0" * 32, "step-1000", "notes"):
        (tmp_path / name).mkdir()
    assert open_checkpoint(tmp_path).step == 200
    assert open_checkpoint(tmp_path, 30).step == 30
    assert open_checkpoint(tmp_path / "step-000000000005").step == 5
    with pytest.raises(CheckpointError, match=r"of step 7 in .*: there are steps 5, 30, 200"):
        open_checkpoint(tmp_path, 7)


def test_a_step_that_is_saved_again_stays_until_the_new_one_is_there(tmp_path):
    save_spans(tmp_path, arrays(1), 2, step=5)
    save_spans(tmp_path, arrays(2), 2, step=5, after=Ancestor(5))
    assert [each.path.name for each in steps_in(FILES, tmp_path)] == [
        "step-000000000005",
        "step-000000000005.2",
    ]
    assert_holds(tmp_path, arrays(2))
    apply_retention(FILES, tmp_path, Keep(last=3))
    assert [each.path.name for each in steps_in(FILES, tmp_path)] == ["step-000000000005.2"]


def test_the_next_save_cleans_what_others_have_left(tmp_path):
    for name in (f".staging-{uuid.uuid4().hex}", f".trash-{uuid.uuid4().hex}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.safetensors").write_text("half")
    (tmp_path / ".mine").mkdir()
    save_spans(tmp_path, arrays(1), 1, step=1)
    assert names_in(tmp_path) == [".mine", "step-000000000001"]


def test_a_rank_0_that_was_thought_dead_cannot_publish_what_was_cleaned(tmp_path, monkeypatch):
    reached, go = threading.Event(), threading.Event()

    def watch(op, number, path):
        if op == "rename" and path.name.startswith(".staging"):
            reached.set()
            assert go.wait(PEERS_S)

    results = []
    thread = threading.Thread(
        target=lambda: results.extend(
            save_spans(tmp_path, arrays(1), 1, 1, files=FaultyFiles(watch))
        )
    )
    thread.start()
    assert reached.wait(PEERS_S)
    # As another process, where the file system has no locks.
    monkeypatch.setattr("fullshard.checkpoint.runs.folder._under_way", set())
    assert save_spans(tmp_path, arrays(2), 1, step=2) == [tmp_path / "step-000000000002"]
    go.set()
    thread.join()
    assert isinstance(results[0], CheckpointError)
    assert [each.step for each in steps_in(FILES, tmp_path)] == [2]


# -- retention -----------------------------------------------------------------------------------


def folders(steps):
    return [StepFolder(step, 1, Path(str(step))) for step in steps]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(last=2), [40, 50]),
        (Keep(last=1, every=20), [20, 40, 50]),
        (Keep(last=1, best=2, metric="loss"), [20, 30, 50]),
        (Keep(last=1, best=1, metric="loss", highest=True), [10, 50]),
    ],
)
def test_which_steps_stay(keep, left):
    steps = folders([10, 20, 30, 40, 50])
    metrics = dict(zip(steps, [9.0, 1.0, 2.0, float("nan"), 5.0], strict=True))
    gone = steps_to_remove(steps, keep, metrics, None)
    assert [each.step for each in steps if each not in gone] == left


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": -1}, {"best": 1}, {"metric": "loss"}])
def test_what_cannot_be_kept(wrong):
    with pytest.raises(ConfigurationError):
        Keep(**wrong)


# -- saving aside --------------------------------------------------------------------------------


def large(mebibytes):
    array = numpy.arange(mebibytes * 2**17, dtype="<i8")
    return array, Piece("w", array.shape, "I64", (whole_box(array.shape),), ArraySource(array))


def in_background(run, piece, files=None, blocks=None, step=1):
    blocks = blocks or Blocks(8 * BLOCK_BYTES)
    plan = Plans().plan([piece], SoloRanks())
    return save_in_background(
        RunFolder(run, files=files or FILES), plan, About(step), SoloRanks(), blocks
    )


def test_the_caller_goes_on_and_may_change_what_it_gave(tmp_path):
    array, piece = large(40)
    expected = array.copy()
    go = threading.Event()
    blocks = Blocks(8 * BLOCK_BYTES)

    def watch(op, number, path):
        if op == "write":
            assert go.wait(PEERS_S)

    saving = in_background(tmp_path, piece, FaultyFiles(watch), blocks)
    assert not saving.done
    array[:] = -1
    go.set()
    assert saving.wait() == tmp_path / "step-000000000001"
    assert saving.done
    assert (open_checkpoint(tmp_path).read("w") == expected).all()
    assert blocks.held_bytes == 3 * BLOCK_BYTES  # 40 MiB


def test_a_further_save_of_the_same_layout_is_not_thought_through_again(monkeypatch):
    works = [Mock(wraps=getattr(planning, n)) for n in ("_rule", "_proposed", "_decide")]
    for work, name in zip(works, ("_rule", "_proposed", "_decide"), strict=True):
        monkeypatch.setattr(planning, name, work)
    plans, (_, piece) = Plans(), large(1)
    first = plans.plan([piece], SoloRanks())
    assert [work.call_count for work in works] == [1, 1, 1]
    _, again = large(1)  # other memory
    second = plans.plan([again], SoloRanks())
    assert [work.call_count for work in works] == [1, 1, 1]
    assert second.tensors == first.tensors
    assert [*second.pieces] == [again]
    plans.plan([large(2)[1]], SoloRanks())
    plans.plan([piece], SoloRanks())  # decided before
    assert [work.call_count for work in works] == [3, 3, 2]


def test_memory_stays_within_its_bound_and_the_caller_waits(tmp_path):
    array, piece = large(100)
    blocks = Blocks(2 * BLOCK_BYTES)
    begun, go = threading.Event(), threading.Event()

    def watch(op, number, path):
        if op == "write" and path.name.endswith("tensors"):
            begun.set()
            assert go.wait(PEERS_S)

    returned = []
    thread = threading.Thread(
        target=lambda: returned.append(in_background(tmp_path, piece, FaultyFiles(watch), blocks))
    )
    thread.start()
    assert begun.wait(PEERS_S)
    time.sleep(0.1)
    assert not returned  # 100 MiB do not fit into 32
    go.set()
    thread.join()
    returned[0].wait()
    assert blocks.held_bytes == 2 * BLOCK_BYTES
    assert (open_checkpoint(tmp_path).read("w") == array).all()
    blocks_again = in_background(tmp_path, piece, blocks=blocks, step=2)
    blocks_again.wait()
    assert blocks.held_bytes == 2 * BLOCK_BYTES


def test_a_second_save_does_not_touch_the_first_that_is_under_way(tmp_path):
    array, piece = large(1)
    begun, go = threading.Event(), threading.Event()

    def watch(op, number, path):
        if op == "write" and path.name.endswith("tensors"):
            begun.set()
            assert go.wait(PEERS_S)

    first = in_background(tmp_path, piece, FaultyFiles(watch), step=1)
    assert begun.wait(PEERS_S)
    with pytest.raises(CheckpointError, match=r"another save of this process.* wait\(\)"):
        in_background(tmp_path, piece, step=2).wait()
    go.set()
    assert first.wait() == tmp_path / "step-000000000001"
    in_background(tmp_path, piece, step=2).wait()
    assert (open_checkpoint(tmp_path, 1).read("w") == array).all()


FORKS = """
import os
from fullshard.checkpoint.streaming import BLOCK_BYTES, Blocks
block = Blocks(2 * BLOCK_BYTES).take()
block[:3] = b"own"
child = os.fork()
if child == 0:
    is_empty = bytes(block[:3]) == bytes(3)
    block[:3] = b"his"
    os._exit(0 if is_empty else 1)
assert os.waitpid(child, 0)[1] == 0
assert bytes(block[:3]) == b"own"
"""


def test_a_fork_writes_into_blocks_of_its_own():
    subprocess.run([sys.executable, "-c", FORKS], check=True)  # where no threads are


@pytest.mark.parametrize("place", ["make_new_folder", "create", "write", "flush", "rename"])
def test_a_failure_aside_does_not_hold_the_caller_and_comes_out_at_wait(tmp_path, place):
    array, piece = large(100)
    blocks = Blocks(2 * BLOCK_BYTES)

    def watch(op, number, path):
        if op == place:
            raise OSError(28, "No space left on device", str(path))

    saving = in_background(tmp_path, piece, FaultyFiles(watch), blocks)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left on device"):
            saving.wait()
    assert steps_in(FILES, tmp_path) == []
    saving = in_background(tmp_path, piece, blocks=blocks)  # no block was lost
    saving.wait()
    assert (open_checkpoint(tmp_path).read("w") == array).all()


def test_what_background_and_finished_say(tmp_path):
    with pytest.raises(ConfigurationError, match="two blocks"):
        Background(host_memory_bytes=BLOCK_BYTES)
    saving = Saving.finished(3, WrittenStep(tmp_path, "0" * 32))
    assert (saving.step, saving.done, saving.wait()) == (3, True, tmp_path)


# -- values beside tensors -----------------------------------------------------------------------

_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=10,
)


@pytest.mark.long
@given(_values)
def test_values_come_back_with_their_types(value):
    back = from_json(to_json(value))
    assert back == value
    assert repr(back) == repr(value)


def test_values_that_are_none():
    assert repr(from_json(to_json(float("nan")))) == "nan"
    with pytest.raises(ConfigurationError, match=r"value\['a'\]\[1\] is a builtins.object"):
        to_json({"a": [1, object()]})
    assert to_json({1, 2}, sorted) == [1, 2]
    for wrong in ({"$bytes": "?"}, {"$x": 1}, {"$tuple": 1}, {"$float": "1"}, {"$items": [1]}):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            from_json(wrong)


# -- ranks that talk through a folder ------------------------------------------------------------


def folder_ranks(run, world, **options):
    ranks = [FolderRanks(run, "0" * 32, rank, world, FILES, **options) for rank in range(world)]
    ranks[0].open()
    return ranks


def test_ranks_save_with_messages_in_a_folder(tmp_path):
    left_over = tmp_path / f".ranks-{'1' * 32}"
    left_over.mkdir()
    (left_over / "1-0").write_text("of a save that was killed")
    ranks = folder_ranks(tmp_path, 3)
    assert not left_over.exists()

    def work(plain):
        mine = ranks[plain.rank]
        assert mine.share(str(mine.rank).encode()) == [b"0", b"1", b"2"]
        folder = save(tmp_path, spans_of(arrays(), mine.rank, 3), About(4), mine)
        mine.leave()
        return folder

    assert set(run_ranks(3, work)) == {tmp_path / "step-000000000004"}
    assert names_in(tmp_path) == ["step-000000000004"]
    assert_holds(tmp_path, arrays())


@pytest.mark.parametrize("leaves", [True, False], ids=["with a word", "without"])
def test_a_rank_that_waits_in_a_folder_does_not_wait_for_ever(tmp_path, leaves):
    first, second = folder_ranks(tmp_path, 2, timeout_s=60.0 if leaves else 0.05)
    if leaves:
        second.leave()
    with pytest.raises(OSError, match="rank 1 has given up" if leaves else "no message for 0.05 s"):
        first.gather(b"")
    first.leave()
    assert list(tmp_path.iterdir()) == ([] if leaves else [tmp_path / f".ranks-{'0' * 32}"])


def test_what_is_on_the_path_without_being_installed_has_no_version():
    versions = versions_of("numpy", "no-such-distribution")
    assert versions["numpy"] == numpy.__version__
    assert versions["no-such-distribution"] == "not installed"
