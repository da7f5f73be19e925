# SPDX-License-Identifier: Apache-2.0
"""Any cut is read as any other cut, bit by bit; and the pure part of it."""

import ml_dtypes  # noqa: F401 (gives numpy bfloat16)
import numpy
import pytest
from safetensors.numpy import load_file
from support.checkpoint_cases import (
    DTYPES,
    ArraySource,
    arrays,
    assert_holds,
    even_spans,
    load_span,
    names_in,
    run_ranks,
    save_spans,
    small_chunks,
    spans_of,
    whole_box,
)

from fullshard.checkpoint import open_checkpoint, reshard_checkpoint
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.saving import save
from fullshard.checkpoint.shards import Piece
from fullshard.core.errors import CheckpointError, ConfigurationError

WORLDS = [1, 2, 3, 4, 5, 8]


@pytest.mark.long
@pytest.mark.parametrize("chunk", [16, 4 * 2**20])
def test_saved_by_any_number_of_ranks_read_by_any_other(tmp_path, monkeypatch, chunk):
    small_chunks(monkeypatch, chunk)
    whole = arrays()
    for world in WORLDS:
        save_spans(tmp_path / str(world), whole, world, step=7)
        checkpoint = open_checkpoint(tmp_path / str(world))
        assert (checkpoint.step, checkpoint.extra) == (7, {"step": 7})
        assert_holds(checkpoint, whole)
        for other in WORLDS:
            parts = [load_span(checkpoint, whole, rank, other) for rank in range(other)]
            for name, (array, _) in whole.items():
                assert b"".join(bytes(part[name]) for part in parts) == array.tobytes()


def test_files_open_with_the_safetensors_library_alone(tmp_path):
    whole = arrays()
    folder = save_spans(tmp_path, whole, 2, step=1)[0]
    held = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert len(held) == 2
    embed = whole["model/embed"][0]
    first = numpy.concatenate(
        [held[0]["model/embed[0:18,0:6]"].reshape(-1), held[0]["model/embed[18:19,0:3]"][0]]
    )
    assert first.tobytes() == embed.reshape(-1)[: embed.size // 2].tobytes()
    assert held[0]["optimizer/embed/step"].tobytes() == whole["optimizer/embed/step"][0].tobytes()


def test_replicas_are_written_once_and_the_work_is_shared(tmp_path):
    large = numpy.arange(2**18, dtype="<f8")  # 2 MiB: shared out
    small = numpy.arange(8, dtype="<f8")

    def work(ranks):
        pieces = [
            Piece(
                f"model/{name}", array.shape, "F64", (whole_box(array.shape),), ArraySource(array)
            )
            for name, array in {"a": large, "b": large + 1, "c": small, "d": small}.items()
        ]
        return save(tmp_path, pieces, About(1), ranks)

    run_ranks(2, work)
    manifest = open_checkpoint(tmp_path).manifest
    writers = {name: {box.file for box in each.boxes} for name, each in manifest.tensors.items()}
    assert writers["model/a"] != writers["model/b"]
    assert writers["model/c"] == writers["model/d"] == {0}
    assert all(len(each.boxes) == 1 for each in manifest.tensors.values())


def test_ranks_that_disagree_about_a_tensor_are_refused_together(tmp_path):
    def work(ranks):
        array = numpy.zeros(4 + ranks.rank, "<f4")
        piece = Piece("w", array.shape, "F32", (whole_box(array.shape),), ArraySource(array))
        return save(tmp_path, [piece], About(1), ranks)

    for error in run_ranks(2, work):
        assert isinstance(error, CheckpointError)
        assert "'w' is F32 of shape (4,) on one rank and F32 of shape (5,)" in str(error)
    assert names_in(tmp_path) == []


def test_rewritten_for_another_number_of_ranks(tmp_path):
    whole = arrays()
    save_spans(tmp_path / "a", whole, 3, step=5)
    source = open_checkpoint(tmp_path / "a")
    folder = reshard_checkpoint(source, tmp_path / "b", 4)
    assert len(list(folder.glob("*.safetensors"))) == 4
    assert_holds(tmp_path / "b", whole)
    assert open_checkpoint(tmp_path / "b").extra == {"step": 5}
    with pytest.raises(ConfigurationError, match="at least 1 rank, got 0"):
        reshard_checkpoint(source, tmp_path / "b", 0)


def test_even_spans_cover_everything_in_order():
    for numel in range(12):
        for world in range(1, 9):
            spans = even_spans(numel, world)
            assert [each for a, b in spans for each in range(a, b)] == list(range(numel))


def test_the_cases_have_every_kind_of_dtype():
    assert {dtype for _, dtype in arrays().values()} <= set(DTYPES)
    assert any(not piece.boxes for piece in spans_of(arrays(), 7, 8))
