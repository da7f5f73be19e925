# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of others: sealed, exported, imported; and the command that does it."""

import json
import os
import pickle
import re
import subprocess
import sys

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file, save_file
from support.checkpoint_cases import arrays, assert_holds, save_spans
from support.limits import PROCESS_S
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fullshard.checkpoint import (
    check_seal,
    export_safetensors,
    import_safetensors,
    is_sealed,
    open_checkpoint,
    seal,
)
from fullshard.checkpoint import command as ckpt
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.torch import load_checkpoint, save_checkpoint
from fullshard.torch.checkpoint.dcp import export_dcp, import_dcp


def floats(seed=0):
    draw = numpy.random.default_rng(seed)
    return {
        "model/a": (draw.random((300, 7), numpy.float32), "F32"),
        "model/b": (draw.random((5,)), "F64"),
        "optimizer/exp_avg/model/a": (draw.random((300, 7), numpy.float32), "F32"),
    }


# -- seals ---------------------------------------------------------------------------------------


def test_a_seal_finds_every_change_in_a_checkpoint_of_others(tmp_path):
    target = tmp_path / "theirs"
    (target / "sub").mkdir(parents=True)
    (target / "a.bin").write_bytes(bytes(range(256)) * 20000)  # more than one chunk
    (target / "sub" / "b.json").write_text("{}")
    assert not is_sealed(target)
    report = seal(target)
    assert (report.file_count, report.size_bytes) == (2, 256 * 20000 + 2)
    assert check_seal(target).unsealed == ()
    data = bytearray((target / "a.bin").read_bytes())
    data[5_000_000] ^= 1
    (target / "a.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match="bytes 4194304 to 5120000 do not match") as caught:
        check_seal(target)
    assert caught.value.byte_range == (4194304, 5120000)
    data[5_000_000] ^= 1
    (target / "a.bin").write_bytes(data)
    (target / "new").write_text("")
    assert check_seal(target).unsealed == ("new",)
    (target / "sub" / "b.json").write_text("{ }")
    with pytest.raises(CheckpointError, match="were sealed, but the file has 3"):
        check_seal(target)
    (target / "sub" / "b.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        check_seal(target)


def test_a_single_file_is_sealed_beside_it(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"123")
    place = seal(tmp_path / "w.safetensors").path
    assert place == tmp_path / "w.safetensors.fullshard-seal.json"
    assert check_seal(tmp_path / "w.safetensors").size_bytes == 3
    text = place.read_bytes()
    for change in (b'"size_bytes":3', b'"size_bytes":4'), (b"xxh3_128", b"xxh3_129"):
        place.write_bytes(text.replace(*change))
        with pytest.raises(CheckpointError):
            check_seal(tmp_path / "w.safetensors")


def test_what_cannot_be_sealed_or_checked(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing at"):
        seal(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="no files to seal"):
        seal(tmp_path)
    with pytest.raises(CheckpointError, match="fullshard ckpt seal"):
        check_seal(tmp_path)


# -- safetensors ---------------------------------------------------------------------------------


def test_exported_as_one_file_and_as_several_with_an_index(tmp_path):
    whole = floats()
    save_spans(tmp_path / "run", whole, 3, step=1)
    checkpoint = open_checkpoint(tmp_path / "run")
    [file] = export_safetensors(checkpoint, tmp_path / "w.safetensors")
    held = load_file(file)
    assert held.keys() == {"a", "b"}
    assert (held["a"] == whole["model/a"][0]).all()
    files = export_safetensors(checkpoint, tmp_path / "several", most_bytes=100)
    assert [each.name for each in files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 300 * 7 * 4 + 5 * 8
    for name, file_name in index["weight_map"].items():
        assert (load_file(files[-1].parent / file_name)[name] == whole[f"model/{name}"][0]).all()
    for source in (tmp_path / "several", file):
        import_safetensors(source, tmp_path / f"from-{source.name}", step=4)
        again = {name: each for name, each in whole.items() if name.startswith("model/")}
        assert_holds(tmp_path / f"from-{source.name}", again, step=4)
    with pytest.raises(ConfigurationError, match="no part 'ema'; it has"):
        export_safetensors(checkpoint, tmp_path / "x", part="ema")


def test_damage_is_not_exported(tmp_path):
    save_spans(tmp_path / "run", floats(), 1, step=1)
    checkpoint = open_checkpoint(tmp_path / "run")
    path = checkpoint.folder / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    data[5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not match"):
        export_safetensors(checkpoint, tmp_path / "w.safetensors")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_imports_that_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors files"):
        import_safetensors(tmp_path, tmp_path / "run")
    (tmp_path / "bad.safetensors").write_bytes((10**11).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match=r"bad\.safetensors cannot be read"):
        import_safetensors(tmp_path, tmp_path / "run")
    (tmp_path / "bad.safetensors").unlink()
    save_file({"a": numpy.zeros(3)}, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weights, why in (
        ({"a": "../a.safetensors"}, "no file beside it"),
        ({"b": "a.safetensors"}, "has no tensor 'b'"),
        (3, "cannot be read"),
    ):
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(CheckpointError, match=why):
            import_safetensors(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- DCP -----------------------------------------------------------------------------------------


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": [p for p in model.parameters() if p.dim() == d]} for d in (1, 2)]
    groups[0]["weight_decay"] = 0.0
    optimizer = torch.optim.AdamW(groups, lr=0.1 * (seed + 1))
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def assert_same(a, b):
    for x, y in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(x, y)
        state, other = a[1].state[x], b[1].state[y]
        assert state.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(state[key], other[key]) for key in state)
    for group, other in zip(a[1].param_groups, b[1].param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in other.items() if k != "params"
        }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flat", [False, True])
def test_dcp_both_ways_optimizer_included(tmp_path, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first = trained(0)
    save_checkpoint(tmp_path / "run", *first, step=3)
    export_dcp(open_checkpoint(tmp_path / "run"), tmp_path / "dcp")
    other = trained(1)
    model, optimizer = get_state_dict(*other, options=options)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    found = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(*other, **found, options=options)
    assert_same(first, other)

    second = trained(2)
    model, optimizer = get_state_dict(*second, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "theirs")
    import_dcp(tmp_path / "theirs", tmp_path / "imported", step=8)
    third = trained(3)
    assert load_checkpoint(tmp_path / "imported", *third).step == 8
    assert_same(second, third)


@pytest.mark.filterwarnings("ignore:.*in a single process")
def test_dcp_files_that_are_damaged_or_gone_are_refused_in_our_words(tmp_path):
    dcp.save({"model": {"w": torch.arange(40.0)}}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    [data] = (tmp_path / "theirs").glob("*.distcp")
    whole = data.read_bytes()
    for change in (whole[:100], whole[:200] + b"x" * 8 + whole[208:], None):
        data.unlink()
        if change is not None:
            data.write_bytes(change)
        with pytest.raises(CheckpointError, match=r"theirs cannot be read: [A-Z]\w+: .+") as caught:
            import_dcp(tmp_path / "theirs", tmp_path / "imported")
        assert "\n" not in str(caught.value)
        if change is None:
            data.write_bytes(whole)
    metadata = dcp.FileSystemReader(tmp_path / "theirs").read_metadata()
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    (tmp_path / "theirs" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'../elsewhere' is no file beside it"):
        import_dcp(tmp_path / "theirs", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
    (tmp_path / "file").write_text("in the way")
    save_checkpoint(tmp_path / "run", torch.nn.Linear(2, 2), step=1)
    with pytest.raises(CheckpointError, match="file/dcp cannot be written"):
        export_dcp(open_checkpoint(tmp_path / "run"), tmp_path / "file" / "dcp")


def test_a_dcp_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "run", torch.nn.Linear(2, 2), step=1)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "finish", full)
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "new", tmp_path / "there"):
        with pytest.raises(CheckpointError, match=r"cannot be written: OSError: .*No space left"):
            export_dcp(open_checkpoint(tmp_path / "run"), target)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there").exists()


def test_metadata_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch ran",)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="which is not loaded"):
        import_dcp(tmp_path, tmp_path / "run")
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_dcp(tmp_path, tmp_path / "run")
    assert not (tmp_path / "ran").exists()


# -- the command ---------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (1, 2):
        save_spans(run, floats(step), 2, step)
    assert ckpt.main(["ls", str(run)]) == 0
    assert "step-000000000002" in capsys.readouterr().out
    assert ckpt.main(["ls", str(run / "step-000000000001")]) == 0
    assert "step-000000000001" in capsys.readouterr().out
    for step in ("-1", "x", "9" * 19):
        with pytest.raises(SystemExit, match="2"):
            ckpt.main(["import", str(other), str(run), "--step", step])
        assert "a step is a number from 0" in capsys.readouterr().err
    assert ckpt.main(["verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out.count(": right") == 2
    assert ckpt.main(["ls", str(run)]) == 0
    assert re.findall("verified.*", capsys.readouterr().out) == [
        "verified",
        "verified: the newest one stays, whatever Keep says",
    ]
    assert ckpt.main(["reshard", str(run), str(other), "--world", "3"]) == 0
    assert_holds(other, floats(2))
    assert ckpt.main(["diff", str(run), str(other)]) == 0
    assert ckpt.main(["diff", str(run / "step-000000000001"), str(other)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"model/b: 5 of 5 elements differ, by [\d.]+ at most", out)
    assert "step: 1 and 2" in out
    assert ckpt.main(["export", str(run), str(tmp_path / "w.safetensors"), "--step", "1"]) == 0
    assert ckpt.main(["import", str(tmp_path / "w.safetensors"), str(other), "--step", "9"]) == 0
    assert open_checkpoint(other).step == 9
    assert ckpt.main(["seal", str(tmp_path / "w.safetensors")]) == 0
    assert ckpt.main(["verify", str(tmp_path / "w.safetensors")]) == 0
    with pytest.raises(ConfigurationError):
        ckpt.main(["ls", str(tmp_path / "nothing")])
    run.rename(tmp_path / "checkpoints")  # as below the folder of `fullshard train`
    for verb, error in (("ls", ConfigurationError), ("verify", CheckpointError)):
        with pytest.raises(error, match=r"there are some in .*/checkpoints"):
            ckpt.main([verb, str(tmp_path)])


def test_the_command_works_without_torch_and_jax(tmp_path):
    save_spans(tmp_path, arrays(), 2, step=1)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['jax'] = sys.modules['rich'] = None; "
        "from fullshard.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for arguments, status, text in (
        (["verify", str(tmp_path)], 0, "right"),
        (["export", str(tmp_path), str(tmp_path / "x"), "--format", "dcp"], 2, "needs torch"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, "ckpt", *arguments],
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert text in done.stdout + done.stderr
