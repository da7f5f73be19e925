# SPDX-License-Identifier: Apache-2.0
"""Whatever has happened to its files, a checkpoint is refused by name before anything is used.

``FULLSHARD_TRIALS=full`` flips 1,000 bits, otherwise a sample.
"""

import json
import random
import shutil
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoint_cases import arrays, load_span, save_spans, small_chunks
from support.sampling import FULL

from fullshard.checkpoint import open_checkpoint
from fullshard.checkpoint.format.envelope import unwrap, wrap
from fullshard.checkpoint.format.manifest import FORMAT, MANIFEST, VERSION, parse_manifest
from fullshard.checkpoint.loading import Loading, Want
from fullshard.core.errors import CheckpointError, FullshardError


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Two steps of a run of two ranks, and another run's, in chunks of 256 bytes."""
    root = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch, 256)
        for step in (1, 2):
            save_spans(root / "run", arrays(step), 2, step)
        save_spans(root / "other", arrays(2), 2, step=2)
        yield root


def load(run):
    """Load the newest step, each of two ranks its part; it must be what was saved."""
    whole = arrays(2)
    checkpoint = open_checkpoint(run)
    parts = [load_span(checkpoint, whole, rank, 2) for rank in range(2)]
    for name, (array, _) in whole.items():
        assert b"".join(part[name].tobytes() for part in parts) == array.tobytes()


def refused(run, by_verify=True):
    """The error with which the newest step of ``run`` is refused."""
    with pytest.raises(CheckpointError) as caught:
        load(run)
    assert caught.value.file is not None
    assert caught.value.file.startswith(str(run))
    if by_verify:
        with pytest.raises(CheckpointError):
            open_checkpoint(run).verify()
    return caught.value


def newest(run):
    return run / "step-000000000002"


def test_one_flipped_bit_anywhere_is_found(good, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(good / "run", run)
    files = [newest(run) / name for name in ("manifest.json", "00000.safetensors")]
    files.append(newest(run) / "00001.safetensors")
    draw = random.Random(0)
    sizes = [path.stat().st_size for path in files]
    # Headers are padded to a page: let data and manifest have their share of the trials.
    places = [(draw.choice(files), draw.random(), draw.randrange(8)) for _ in range(1000)]
    found = 0
    for path, where, bit in places if FULL else places[:60]:
        data = bytearray(path.read_bytes())
        offset = int(where * len(data))
        data[offset] ^= 1 << bit
        path.write_bytes(data)
        error = refused(run, by_verify=False)
        assert error.file == str(path), (path, offset, bit)
        if error.byte_range is not None:
            assert error.byte_range[0] <= offset < error.byte_range[1]
        data[offset] ^= 1 << bit
        path.write_bytes(data)
        found += 1
    assert found == (1000 if FULL else 60)
    assert [path.stat().st_size for path in files] == sizes
    load(run)


def damages():
    def write(path, change):
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    def zeroed(run, _):
        path = newest(run) / "00000.safetensors"
        write(path, lambda data: data.__setitem__(slice(4096, None), bytes(len(data) - 4096)))

    def zeroed_header(run, _):
        write(newest(run) / "00001.safetensors", lambda d: d.__setitem__(slice(4096), bytes(4096)))

    def truncated(run, _):
        write(newest(run) / "00001.safetensors", lambda data: data.__delitem__(slice(-100, None)))

    def lengthened(run, _):
        write(newest(run) / "00001.safetensors", lambda data: data.extend(b"x"))

    def truncated_manifest(run, _):
        write(newest(run) / MANIFEST, lambda data: data.__delitem__(slice(-100, None)))

    def empty_manifest(run, _):
        write(newest(run) / MANIFEST, lambda data: data.clear())

    def another_step(run, _):
        name = "00001.safetensors"
        shutil.copy(run / "step-000000000001" / name, newest(run) / name)

    def another_run(run, root):
        # the same step, the same values, another save
        shutil.copy(newest(root / "other") / "00001.safetensors", newest(run))

    def manifest_of_another_save(run, root):
        shutil.copy(newest(root / "other") / MANIFEST, newest(run))

    def another_rank(run, _):
        a, b = (newest(run) / f"0000{rank}.safetensors" for rank in (0, 1))
        data = a.read_bytes(), b.read_bytes()
        a.write_bytes(data[1])
        b.write_bytes(data[0])

    def deleted(run, _):
        (newest(run) / "00001.safetensors").unlink()

    def a_folder(run, _):
        deleted(run, _)
        (newest(run) / "00001.safetensors").mkdir()

    def a_link(run, _):
        path = newest(run) / "00001.safetensors"
        path.rename(run / "elsewhere")
        path.symlink_to(run / "elsewhere")

    def huge_header(run, _):
        write(
            newest(run) / "00000.safetensors",
            lambda data: data.__setitem__(slice(8), (100 * 10**9).to_bytes(8, "little")),
        )

    return [each for name, each in sorted(locals().items()) if name != "write"]


@pytest.mark.parametrize("damage", damages(), ids=lambda damage: damage.__name__)
def test_damage_is_refused_by_name(good, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(good / "run", run)
    load(run)
    damage(run, good)
    error = refused(run)
    assert "step-000000000002" in str(error)


def forged(run, change):
    """Change the content of the newest manifest, with a checksum that is right."""
    path = newest(run) / MANIFEST
    content = unwrap(path.read_bytes(), FORMAT, VERSION, path)
    changed = change(content)
    path.write_bytes(wrap(FORMAT, changed if isinstance(changed, int) else VERSION, content))


FORGERIES = {
    "reads 2": lambda m: 3,
    "no name of a file beside": lambda m: m["files"][0].update(name="../other.safetensors"),
    "no name of a file": lambda m: m["files"][0].update(name="/etc/passwd.safetensors"),
    "has a header of 100000000000": lambda m: m["files"][0].update(header_bytes=10**11),
    "two files have one name": lambda m: m["files"][1].update(name=m["files"][0]["name"]),
    "expected a number from 0": lambda m: m["files"][0].update(size_bytes=-1),
    "do not cover each": lambda m: m["tensors"]["model/embed"]["boxes"].pop(),
    "is in file 9 of 2": lambda m: m["tensors"]["model/embed"]["boxes"][0].__setitem__(2, 9),
    "which have": lambda m: m["files"][0].update(size_bytes=m["files"][0]["size_bytes"] + 16),
    "bytes of checksums": lambda m: m["files"][0].update(table_bytes=17),
    "as the manifest does": lambda m: m["tensors"]["model/embed"]["boxes"][0].__setitem__(2, 1),
    "has 2 numbers, expected 3": lambda m: m["tensors"]["model/embed"]["boxes"][0].__delitem__(0),
    "has dtype 'F33'": lambda m: m["tensors"]["model/embed"].update(dtype="F33"),
    "has a box at": lambda m: m["tensors"]["model/embed"]["boxes"][0].__setitem__(0, [36, 0]),
    "a checksum of": lambda m: m["files"][0].update(table_xxh3_128=""),
    "has no tensor or is one": lambda m: m["aliases"].update(a="b"),
    "cannot be read: unknown tag": lambda m: m.update(extra={"$code": "import os"}),
    "tensors is list": lambda m: m.update(tensors=[]),
}


@pytest.mark.parametrize("why", FORGERIES)
def test_a_manifest_that_lies_is_refused_though_its_checksum_is_right(good, tmp_path, why):
    run = tmp_path / "run"
    shutil.copytree(good / "run", run)
    forged(run, FORGERIES[why])
    assert why in str(refused(run))


@pytest.mark.parametrize(("version", "use"), [(VERSION - 1, "an older"), (VERSION + 1, "a newer")])
def test_another_version_of_the_format_is_refused_as_such(version, use):
    with pytest.raises(
        CheckpointError, match=f"has version {version} .* reads {VERSION}: use {use}"
    ):
        parse_manifest(wrap(FORMAT, version, {}), Path(MANIFEST))


@pytest.mark.parametrize("kept_bytes", [0, 2**30])
def test_nothing_is_delivered_when_the_last_chunk_is_damaged(good, tmp_path, kept_bytes):
    run = tmp_path / "run"
    shutil.copytree(good / "run", run)
    checkpoint = open_checkpoint(run)
    path = newest(run) / "00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    whole = arrays(2)
    targets = {name: numpy.full(array.nbytes, 7, "u1") for name, (array, _) in whole.items()}
    wants = [
        Want(name, tuple(stored.box for stored in checkpoint.stored(name).boxes), each.data)
        for name, each in targets.items()
    ]
    with Loading(checkpoint, wants, kept_bytes) as loading, pytest.raises(CheckpointError):
        loading.verify()
    assert all((each == 7).all() for each in targets.values())


# -- fuzz ----------------------------------------------------------------------------------------

EXAMPLES = 60_000 if FULL else 300  # about ten minutes, a second

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@pytest.mark.long
@pytest.mark.timeout(3600 if FULL else 300)
@given(data=st.data())
@settings(max_examples=EXAMPLES, deadline=None, database=None)
def test_readers_raise_only_our_errors(good, data):
    path = newest(good / "run") / MANIFEST
    raw = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["bytes", "changed", "json", "content"]))
    if kind == "bytes":
        raw = bytearray(data.draw(st.binary(max_size=200)))
    elif kind == "changed":
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=40))
    elif kind == "json":
        body = json.dumps(data.draw(_json)).encode()
        raw = bytearray(wrap(FORMAT, 1, None).replace(b"\nnull\n", b"\n" + body + b"\n"))
        with pytest.raises(FullshardError):
            parse_manifest(bytes(raw), path)
        content = json.loads(body)
        if "NaN" in body.decode() or "Infinity" in body.decode():
            return
        raw = bytearray(wrap(FORMAT, VERSION, content))
    else:
        content = unwrap(bytes(raw), FORMAT, VERSION, path)
        _replace_somewhere(content, data)
        try:
            raw = bytearray(wrap(FORMAT, VERSION, content))
        except ValueError:  # NaN: no such file can be
            return
    try:
        parse_manifest(bytes(raw), path)
    except FullshardError as error:
        told = str(error)
    else:
        return
    assert str(path) in told


def _replace_somewhere(content, data):
    while True:
        key = data.draw(
            st.sampled_from(
                sorted(content) if isinstance(content, dict) else list(range(len(content)))
            )
        )
        inner = content[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.integers(0, 4)) == 0:
            content[key] = data.draw(_json)
            return
        content = inner
