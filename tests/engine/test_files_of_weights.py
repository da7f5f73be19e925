# SPDX-License-Identifier: Apache-2.0
"""Files of weights: what a failure leaves behind, and headers that somebody has tampered with."""

import contextlib
import errno
import json
import os
import resource
import stat

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.core.safetensors_format import Entry, FileWriter, entries_in, header_of
from fullshard.torch import fully_shard, load_full_weights, save_full_weights
from fullshard.torch.comm.protocol import SoloComm

HEADER = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]},
}


def small_model():
    return fully_shard(nn.Linear(3, 2), mesh=SoloComm())


def write(path, header, data=bytes(28)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@contextlib.contextmanager
def full_disk():
    """As far as `write` can tell: files may have 200 bytes, that of pytest's own output too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    target = tmp_path / "weights"
    target.write_bytes(b"before")
    model = fully_shard(nn.Linear(30, 20), mesh=SoloComm())
    with pytest.raises(ConfigurationError, match="could not write"), full_disk():
        save_full_weights(model, target)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert target.read_bytes() == b"before"


def test_a_disk_that_fails_at_the_very_end_leaves_nothing_behind(tmp_path, monkeypatch):
    def fsync(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigurationError, match="No space left"):
        save_full_weights(small_model(), tmp_path / "weights")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / "weights.partial").write_bytes(b"left")
    save_full_weights(small_model(), tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("place", ["weights", "weights.partial"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_only_regular_files_are_replaced(tmp_path, kind, place):
    path = tmp_path / place
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    before = path.lstat().st_mode
    with pytest.raises(ConfigurationError, match="no regular file"):
        save_full_weights(small_model(), tmp_path / "weights")
    assert path.lstat().st_mode == before
    assert [each.name for each in tmp_path.iterdir()] == [place]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("real")
    save_full_weights(small_model(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert safetensors.torch.load_file(tmp_path / "real").keys() == {"weight", "bias"}


def test_two_who_write_the_same_file_do_not_mix(tmp_path):
    header = header_of({"a": Entry("U8", (2,))})
    with FileWriter(tmp_path / "file", header) as first:
        second = FileWriter(tmp_path / "file", header)
        first.append(b"11")
    assert first.failure is not None
    with second:
        second.append(b"22")
    assert (tmp_path / "file").read_bytes() == header + b"22"
    assert len(list(tmp_path.iterdir())) == 1


BAD = {
    "overlapping": ({**HEADER, "b": {**HEADER["b"], "data_offsets": [20, 24]}}, bytes(24)),
    "a hole": ({**HEADER, "b": {**HEADER["b"], "data_offsets": [28, 32]}}, bytes(32)),
    "trailing bytes": (HEADER, bytes(29)),
    "float shape": ({**HEADER, "b": {**HEADER["b"], "shape": [1.0]}}, bytes(28)),
    "bool shape": ({**HEADER, "b": {**HEADER["b"], "shape": [True]}}, bytes(28)),
    "nested": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", bytes(28)),
    "nested metadata": (
        json.dumps(HEADER).encode()[:-1] + b',"__metadata__":' + b"[" * 100_000,
        bytes(28),
    ),
    "twice": (json.dumps(HEADER).encode()[:-1] + b',"a":' + json.dumps(HEADER["a"]).encode() + b"}",
              bytes(28)),
    "twice within": (json.dumps(HEADER).encode().replace(b'"shape": [1]',
                                                         b'"shape": [9], "shape": [1]'), bytes(28)),
    "dtype that is no text": ({**HEADER, "b": {**HEADER["b"], "dtype": ["F32"]}}, bytes(28)),
    "huge number": (json.dumps(HEADER).encode().replace(b"[1]", b"[" + b"1" * 5000 + b"]"),
                    bytes(28)),
    "metadata of numbers": ({**HEADER, "__metadata__": {"x": 1}}, bytes(28)),
    "no text": (b"\xff\xfe{}", b""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_is_refused_before_anything_changes(tmp_path, case):
    plain = nn.Module()
    plain.a, plain.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    model = fully_shard(plain, mesh=SoloComm())
    path = write(tmp_path / "file", *BAD[case])
    with pytest.raises(ConfigurationError):
        load_full_weights(model, path)
    with pytest.raises(ConfigurationError):
        entries_in(path)
    assert all(bool((param.detach().full_tensor() == 1).all()) for param in model.parameters())


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(ConfigurationError, match="no regular file"):
        load_full_weights(small_model(), tmp_path / "file")


numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([True, 1.0, 2.0, "3", None, 2**63, 10**30])
)
told = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "F64", "I16", "BOOL", "F7", 3, None]),
        "shape": st.one_of(st.lists(numbers, max_size=3), st.just(4)),
        "data_offsets": st.one_of(st.lists(numbers, min_size=1, max_size=3), st.none()),
        "more": st.just(1),
    },
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__", ""]), st.one_of(told, st.integers(0, 1))
)


@pytest.mark.long
@settings(max_examples=400)
@given(headers, st.integers(0, 40), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255))))
def test_fuzz_reading_accepts_nothing_that_safetensors_refuses(
    tmp_path_factory, header, data_bytes, changed
):
    text = bytearray(json.dumps({**HEADER, **header}).encode())
    for place, byte in changed[:2]:
        text[place % len(text)] = byte
    path = write(tmp_path_factory.getbasetemp() / "fuzzed", bytes(text), bytes(data_bytes))
    try:
        places = entries_in(path)
    except FullshardError:
        return
    found = safetensors.deserialize(path.read_bytes())
    assert {name: (p.entry.dtype, list(p.entry.shape)) for name, p in places.items()} == {
        name: (each["dtype"], each["shape"]) for name, each in found
    }
