# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads, file systems that fail, and small checkpoints, without torch or jax."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from support.limits import PEERS_S

from fullshard.checkpoint.background import Saving
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.loading import Checkpoint, Loading, Want, open_checkpoint
from fullshard.checkpoint.runs.folder import LOCK
from fullshard.checkpoint.saving import save
from fullshard.checkpoint.shards import Piece, memory_view
from fullshard.core.boxes import Box, boxes_of_interval

CHUNKED = (
    "format.index",
    "format.manifest",
    "shards",
    "reading.reads",
    "foreign.seals",
)


def small_chunks(monkeypatch, size_bytes):
    """Let chunks have ``size_bytes`` and parts a few of them, so that small tensors have many."""
    for name in CHUNKED:
        monkeypatch.setattr(f"fullshard.checkpoint.{name}.CHUNK_BYTES", size_bytes)
    monkeypatch.setattr("fullshard.checkpoint.loading.PIECE_BYTES", 3 * size_bytes + 16)
    monkeypatch.setattr("fullshard.checkpoint.reading.reads._scratch", threading.local())


class ArraySource:
    """The bytes of a contiguous numpy array."""

    def __init__(self, array):
        self._bytes = memory_view(array)

    def copy_into(self, view, start):
        view[:] = self._bytes[start : start + view.nbytes]


class ThreadRanks:
    """One of several ranks that are threads; see `run_ranks`."""

    def __init__(self, rank, world):
        self.rank, self.size, self.world = rank, len(world["slots"]), world

    def gather(self, data):
        assert isinstance(data, bytes)
        self.world["slots"][self.rank] = data
        self.world["barrier"].wait()
        found = list(self.world["slots"])
        self.world["barrier"].wait()
        return found if self.rank == 0 else []

    def broadcast(self, data):
        return self._all(data)[0]

    def share(self, data):
        return self._all(data)

    def _all(self, data):
        self.world["slots"][self.rank] = data
        self.world["barrier"].wait()
        found = list(self.world["slots"])
        self.world["barrier"].wait()
        return found

    def duplicate(self, *_):
        if self.rank == 0:
            self.world["copy"] = new_world(self.size)
        self.world["barrier"].wait()
        copy = ThreadRanks(self.rank, self.world["copy"])
        self.world["barrier"].wait()
        return copy


def new_world(size):
    return {"slots": [None] * size, "barrier": threading.Barrier(size, timeout=PEERS_S)}


def run_ranks(size, work):
    """``work(ranks)`` on each of ``size`` ranks: what each returned or raised."""
    world = new_world(size)

    def one(rank):
        try:
            return work(ThreadRanks(rank, world))
        except Exception as error:
            if not isinstance(error, AssertionError):
                return error
            world["barrier"].abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


class FaultyFiles(Files):
    """A file system on which ``watch(op, number, path)`` is called around every operation.

    It is a context manager, or raises.
    """

    def __init__(self, watch):
        self.watch = watch
        self.calls = []
        self.counting = threading.Lock()


def _watched(name):
    plain = getattr(Files, name)

    def method(self, *args, **kwargs):
        with self.counting:
            number = len(self.calls)
            self.calls.append(name)
        path = args[0] if isinstance(args[0], Path) else args[0].path
        with self.watch(name, number, path) or contextlib.nullcontext():
            return plain(self, *args, **kwargs)

    return method


OPERATIONS = [name for name in vars(Files) if not name.startswith("_")]
for _name in OPERATIONS:
    setattr(FaultyFiles, _name, _watched(_name))


def even_spans(numel, world):
    """[start, stop) of each of ``world`` nearly equal parts of ``numel`` elements, in order."""
    return [(numel * rank // world, numel * (rank + 1) // world) for rank in range(world)]


DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "BF16": "<u2", "U8": "u1", "BOOL": "u1"}


def arrays(seed=0):
    """A few tensors of several dtypes and shapes, whole."""
    draw = numpy.random.default_rng(seed)

    def random(shape, dtype):
        raw = draw.integers(0, 256, size=(*shape, numpy.dtype(DTYPES[dtype]).itemsize))
        raw = raw.astype(numpy.uint8)
        return raw.view(DTYPES[dtype]).reshape(shape), dtype

    return {
        "model/embed": random((37, 6), "F32"),
        "model/blocks.0.w": random((5, 7, 3), "BF16"),
        "model/blocks.0.b": random((7,), "F64"),
        "model/flags": random((9,), "U8"),
        "model/nothing": random((0, 4), "F32"),
        "optimizer/embed/step": random((), "F32"),
    }


def spans_of(whole, rank, world):
    """What one of ``world`` ranks holds: its even part of each tensor, scalars on every rank."""
    pieces = []
    for name, (array, dtype) in whole.items():
        start, stop = even_spans(array.size, world)[rank] if array.shape else (0, 1)
        boxes = tuple(boxes_of_interval(array.shape, start, stop))
        source = ArraySource(array.reshape(-1)[start:stop].copy())
        pieces.append(Piece(name, array.shape, dtype, boxes, source))
    return pieces


def save_spans(run, whole, world, step, after=None, **options):
    """Save ``whole`` on ``world`` ranks: what each rank returned or raised."""
    about = About(step, extra={"step": step}, after=after)

    def work(ranks):
        return save(Path(run), spans_of(whole, ranks.rank, world), about, ranks, **options)

    return run_ranks(world, work)


def load_span(checkpoint, whole, rank, world, **options):
    """What a rank reads as its even part of each tensor, flat bytes by name."""
    wants, targets = [], {}
    for name, (array, _) in whole.items():
        start, stop = even_spans(array.size, world)[rank]
        targets[name] = numpy.zeros((stop - start) * array.itemsize, numpy.uint8)
        boxes = tuple(boxes_of_interval(array.shape, start, stop))
        wants.append(Want(name, boxes, targets[name].data))
    with Loading(checkpoint, wants, **options) as loading:
        loading.verify()
        for _ in loading.deliver():
            pass
    return targets


def assert_holds(run, whole, step=None):
    """The run's newest step (or ``step``) has exactly ``whole``."""
    checkpoint = run if isinstance(run, Checkpoint) else open_checkpoint(run, step)
    assert set(checkpoint.manifest.tensors) == set(whole)
    for name, (array, _) in whole.items():
        assert checkpoint.read(name).tobytes() == array.tobytes(), name
    checkpoint.verify()


def names_in(folder):
    """What is in a run folder but its lock, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def whole_box(shape):
    return Box((0,) * len(shape), tuple(shape))


def outcome(saving):
    assert isinstance(saving, Saving)
    return saving.wait()
