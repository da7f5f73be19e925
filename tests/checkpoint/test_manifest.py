# SPDX-License-Identifier: Apache-2.0
"""A manifest has a rule for what is cut regularly."""

import json
import math
import shutil
import tracemalloc
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_cases import (
    ArraySource,
    arrays,
    assert_holds,
    load_span,
    run_ranks,
    whole_box,
)

from fullshard.checkpoint import (
    open_checkpoint,
    planning,
)
from fullshard.checkpoint.format.envelope import unwrap, wrap
from fullshard.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    parse_manifest,
    render_manifest,
)
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.format.tiling import (
    Slicing,
    Tile,
    boxes_of_part,
    grid_tile,
    part_count,
    part_numels,
    parts_meeting,
    runs_of,
    why_no_rule,
)
from fullshard.checkpoint.planning import Plans
from fullshard.checkpoint.saving import save
from fullshard.checkpoint.shards import Piece
from fullshard.core.boxes import Box, boxes_of_interval, intersection
from fullshard.core.errors import CheckpointError

# -- rules ---------------------------------------------------------------------------------------


@st.composite
def rules(draw):
    """A shape, and slicings that may be a rule for it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    number = st.integers(0, 9)
    slicing = st.builds(
        Slicing, st.sampled_from([None, *range(len(shape))]), number, number, st.integers(0, 5)
    )
    return shape, tuple(draw(st.lists(slicing, max_size=3)))


@given(rules(), st.data())
@settings(max_examples=500, deadline=None)
def test_the_parts_of_a_rule_have_each_element_once(rule, data):
    shape, slicings = rule
    if why_no_rule(shape, slicings):
        return
    parts = range(part_count(slicings))
    times = numpy.zeros(shape, int)
    for part in parts:
        for box in boxes_of_part(shape, slicings, part):
            times[_slices(box)] += 1
    assert (times == 1).all()
    boxes = [boxes_of_part(shape, slicings, part) for part in parts]
    assert part_numels(shape, slicings).tolist() == [sum(b.numel for b in bs) for bs in boxes]
    ends = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    for wanted in boxes_of_interval(shape, *ends):
        met = [part for part in parts if any(intersection(wanted, box) for box in boxes[part])]
        assert set(met) <= set(parts_meeting(shape, slicings, wanted)) <= set(parts)


def _slices(box):
    return tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))


@given(st.lists(st.integers(-3, 3)))
def test_runs_are_the_numbers_they_were_made_of(numbers):
    runs = runs_of(numpy.cumsum(numbers, dtype=int)) if numbers else ()
    told = [first + step * n for first, step, count in runs for n in range(count)]
    assert told == numpy.cumsum(numbers).tolist()
    assert len(runs_of(numpy.arange(3, 90, 4))) == 1


def test_a_box_of_a_grid_is_told_by_its_place():
    tile = grid_tile((8, 3, 6), Box((4, 0, 3), (2, 3, 3)))
    assert tile == Tile((Slicing(0, 0, 2, 4), Slicing(2, 0, 3, 2)), 5)
    assert boxes_of_part((8, 3, 6), tile.slicings, 5) == (Box((4, 0, 3), (2, 3, 3)),)
    assert grid_tile((8,), Box((0,), (8,))) == Tile((), 0)
    assert grid_tile((8,), Box((3,), (2,))) is None


# -- saves by rules ------------------------------------------------------------------------------


def ruled(whole, rank, world, replicas=1):
    """Return a rank's pieces of a flat buffer that is cut into equal slices, with their rules."""
    pieces, start, shards = [], 0, world // replicas
    size = -(-sum(array.size for array, _ in whole.values()) // shards)
    for name, (array, dtype) in whole.items():
        tile = Tile((Slicing(None, start, size, shards),), rank % shards)
        if not array.size:
            tile = Tile((), 0)
        first, stop = tile.slicings[0].interval(tile.index, array.size) if array.size else (0, 0)
        boxes = tuple(boxes_of_interval(array.shape, first, stop))
        source = ArraySource(array.reshape(-1)[first:stop].copy())
        pieces.append(Piece(name, array.shape, dtype, boxes, source, tile))
        start += array.size
    own = numpy.full(5, rank, "u1")
    return [*pieces, Piece(f"own/{rank}", (5,), "U8", (whole_box((5,)),), ArraySource(own))]


def save_ruled(run, world, replicas=1, change=lambda rank, pieces: pieces):
    def work(ranks):
        pieces = change(ranks.rank, ruled(arrays(1), ranks.rank, world, replicas))
        return save(Path(run), pieces, About(1), ranks)

    return run_ranks(world, work)


def with_own(world):
    own = {f"own/{rank}": (numpy.full(5, rank, "u1"), "U8") for rank in range(world)}
    return {**arrays(1), **own}


@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (3, 1), (4, 2), (6, 3)])
def test_what_rules_tell_is_loaded_on_any_number_of_ranks(tmp_path, world, replicas):
    save_ruled(tmp_path, world, replicas)
    checkpoint = open_checkpoint(tmp_path)
    whole = with_own(world)
    assert_holds(checkpoint, whole)
    tensors = checkpoint.manifest.tensors
    assert {name for name, each in tensors.items() if each.tiling is None} == {
        "model/nothing",
        *(f"own/{rank}" for rank in range(world)),
    }
    for other in (1, 2, 5):
        parts = [load_span(checkpoint, whole, rank, other) for rank in range(other)]
        for name, (array, _) in whole.items():
            assert b"".join(bytes(part[name]) for part in parts) == array.tobytes()
    data = (checkpoint.folder / MANIFEST).read_bytes()
    assert parse_manifest(render_manifest(checkpoint.manifest), tmp_path) == checkpoint.manifest
    assert render_manifest(checkpoint.manifest) == data


def test_a_rule_that_only_some_ranks_tell_is_listed(tmp_path):
    def change(rank, pieces):
        others = {
            1: None,
            2: Tile((Slicing(None, 0, 100, 3),), 2),
        }  # ranks 1 and 2 tell none, or one that is not so
        first = pieces[0]
        tile = others.get(rank, first.tile)
        told = Piece(first.name, first.shape, first.dtype, first.boxes, first.source, tile)
        return [told, *pieces[1:]]

    save_ruled(tmp_path, 3, change=change)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.manifest.tensors["model/embed"].tiling is None
    assert checkpoint.manifest.tensors["model/flags"].tiling is not None
    assert_holds(checkpoint, with_own(3))


def test_parts_of_a_rule_that_no_rank_holds_are_refused(tmp_path):
    [*errors] = save_ruled(tmp_path, 3, change=lambda rank, pieces: pieces[1:] if rank else pieces)
    assert all("'model/embed' do not cover each of its elements" in str(each) for each in errors)


def test_a_decision_that_fails_on_rank_0_reaches_all_ranks(tmp_path, monkeypatch):
    def fail(self):
        raise MemoryError("made to fail")

    monkeypatch.setattr(planning._Decision, "made", fail)
    errors = save_ruled(tmp_path, 3)
    assert [str(each) for each in errors] == [
        "the step cannot be saved: MemoryError: made to fail"
    ] * 3


class OneOfMany:
    """Rank 0 of many ranks, which say what it says, but for the number of their part."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def share(self, data):
        return [data]

    def broadcast(self, data):
        return data

    def gather(self, data):
        if not data.startswith(b'["'):
            return [data]
        digest, indices, _ = json.loads(data)
        told = [
            [digest, [rank if index is not None else None for index in indices], []]
            for rank in range(1, self.size)
        ]
        return [data, *(json.dumps(each).encode() for each in told)]


def test_what_rank_0_holds_of_a_plan_does_not_grow_with_ranks_times_tensors():
    def peak(ranks, tensors):
        array = numpy.zeros(2, "u1")
        box = boxes_of_interval((2 * ranks,), 0, 2)
        tile = Tile((Slicing(None, 0, 2, ranks),), 0)
        pieces = [
            Piece(f"w{n}", (2 * ranks,), "U8", tuple(box), ArraySource(array), tile)
            for n in range(tensors)
        ]
        tracemalloc.start()
        plan = Plans().plan(pieces, OneOfMany(ranks))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert {each.tiling.files for each in plan.tensors.values()} == {((0, 1, ranks),)}
        return most

    few, many = peak(1000, 10), peak(1000, 500)
    assert many - few < 490 * 4000  # bytes a tensor, and not a rank


# -- forgeries -----------------------------------------------------------------------------------


def _embed(**changes):
    return lambda m: m["tensors"]["model/embed"].update(changes)


FORGERIES = {
    "does not cut all": _embed(slicings=[[None, 0, 1, 3]]),
    "slicing 0": _embed(slicings=[[2, 0, 100, 3]]),
    "slicing 1": _embed(slicings=[[1, 0, 6, 1], [None, 0, 100, 3], [0, 0, 37, 1]]),
    "has no rule: 4611686018427387903 parts": _embed(slicings=[[None, 0, 1, 2**62 - 1]]),
    "expected a number from 0": _embed(slicings=[[None, 0, 2**62, 3]]),
    "has 3 numbers, expected 4": _embed(slicings=[[None, 0, 100]]),
    "has 65 slicings": _embed(slicings=[[0, 0, 37, 1]] * 65),
    "has a rule, and boxes too": _embed(boxes=[]),
    "is in files 0 to 3 of 3": _embed(files=[[0, 1, 4]]),
    "is in files 2 to -1": _embed(files=[[2, -1, 4]]),
    "are not those of its 3 parts": _embed(files=[[0, 1, 2]]),
    "world is 16777217": lambda m: m.update(world=2**24 + 1),
    "which have": lambda m: m["tensors"].pop("own/1"),
    "is no name of a file": lambda m: m["files"][0].update(name="../a.safetensors"),
}


def forged(folder, change):
    path = folder / MANIFEST
    content = unwrap(path.read_bytes(), FORMAT, VERSION, path)
    change(content)
    path.write_bytes(wrap(FORMAT, VERSION, content))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("ruled")
    return save_ruled(root, 3)[0]


@pytest.mark.parametrize("why", FORGERIES)
def test_a_rule_that_lies_is_refused(good, tmp_path, why):
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    forged(folder, FORGERIES[why])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder).verify()
    assert why in str(caught.value)
    assert str(folder) in caught.value.file


_numbers = st.none() | st.integers(-(2**64), 2**64) | st.integers(-3, 40) | st.booleans()


@given(
    st.lists(st.lists(_numbers, min_size=3, max_size=5) | _numbers, max_size=4),
    st.lists(st.lists(_numbers, min_size=2, max_size=3) | _numbers, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_any_rule_is_read_or_refused_by_our_errors(good, slicings, files):
    content = unwrap((good / MANIFEST).read_bytes(), FORMAT, VERSION, good)
    content["tensors"]["model/embed"].update(slicings=slicings, files=files)
    try:
        manifest = parse_manifest(wrap(FORMAT, VERSION, content), good)
    except CheckpointError:
        return
    assert sum(each.box.numel for each in manifest.tensors["model/embed"].boxes) == 37 * 6


def test_boxes_that_a_file_has_and_the_manifest_has_not_are_found(good, tmp_path):
    folder = tmp_path / good.name
    shutil.copytree(good, folder)

    def swap(m):  # as many bytes, in the file that has another one
        m["tensors"]["own/1"]["boxes"][0][2] = 0

    forged(folder, swap)
    with pytest.raises(CheckpointError, match="tell of other boxes than the manifest"):
        open_checkpoint(folder).verify()
    with pytest.raises(CheckpointError, match=r"'own/1'.* do not tell of 'own/1' as the manifest"):
        open_checkpoint(folder).read("own/1")


def test_a_file_that_is_missing_is_named(good, tmp_path):
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    (folder / "00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002\.safetensors: .* cannot be read"):
        open_checkpoint(folder).verify()


def test_every_bit_of_the_checksums_is_covered(good, tmp_path):
    folder = tmp_path / good.name
    shutil.copytree(good, folder)
    path = folder / "00001.safetensors"
    data = bytearray(path.read_bytes())
    told = open_checkpoint(folder).manifest.files[1]
    for offset in range(told.size_bytes - told.table_bytes, told.size_bytes):
        data[offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="do not match their checksum") as caught:
            open_checkpoint(folder).verify()
        assert caught.value.byte_range[0] <= offset < caught.value.byte_range[1]
        data[offset] ^= 1
