# SPDX-License-Identifier: Apache-2.0
"""Going back loses nothing, nothing outside of a run folder is deleted, settings stay true."""

import os
import subprocess
import sys

import numpy
import pytest
import torch
from support.checkpoint_cases import arrays, names_in, save_spans
from support.limits import PROCESS_S
from torch import nn

from fullshard.checkpoint import (
    Background,
    Files,
    Keep,
    RunFolder,
    command,
    open_checkpoint,
    seal,
    steps_in,
)
from fullshard.checkpoint.format.manifest import _tile
from fullshard.checkpoint.format.stored import StoredBox
from fullshard.core.boxes import Box
from fullshard.core.errors import CheckpointError, ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, load_checkpoint, save_checkpoint


def linear():
    return nn.Linear(3, 2)


def steps_of(folder):
    return [step.step for step in steps_in(Files(), folder)]


def saved(run, model, *steps, **options):
    for step in steps:
        save_checkpoint(run, model, step=step, **options)


# -- going back ----------------------------------------------------------------------------------


def test_going_back_keeps_what_comes_and_moves_what_followed_aside(tmp_path):
    run, model = RunFolder(tmp_path, keep=Keep(last=2, every=1000)), linear()
    saved(run, model, 1000, 2000, 3000, 3500)
    with pytest.warns(RuntimeWarning, match=r"step 1000 is .* later ones \(2000, 3000, 3500"):
        loaded = load_checkpoint(run, model, step=1000)
    assert loaded.newer == (2000, 3000, 3500)
    assert steps_of(tmp_path) == [1000, 2000, 3000, 3500]  # a load changes nothing
    saved(run, model, 1100, 1200, 1300)
    assert steps_of(tmp_path) == [1000, 1200, 1300]
    assert steps_of(tmp_path / "aside-1") == [2000, 3000, 3500]
    assert load_checkpoint(run, model).step == 1300
    with pytest.raises(CheckpointError, match=r"step 3000 was moved aside: load .*aside-1"):
        load_checkpoint(run, model, step=3000)
    assert load_checkpoint(tmp_path / "aside-1", model).step == 3500
    parent = open_checkpoint(tmp_path, 1300).manifest.after
    assert (parent.step, parent.generation) == (
        1200,
        open_checkpoint(tmp_path, 1200).manifest.generation,
    )


def test_the_command_shows_what_was_moved_aside(tmp_path, capsys):
    model = linear()
    saved(tmp_path, model, 1, 2)
    with pytest.warns(RuntimeWarning, match="later ones"):
        load_checkpoint(tmp_path, model, step=1)
    saved(tmp_path, model, 2)
    assert command.main(["ls", str(tmp_path)]) == 0
    assert "aside-1  moved aside: steps 2" in capsys.readouterr().out
    assert command.main(["verify", str(tmp_path / "aside-1")]) == 0


def test_a_run_from_the_beginning_in_an_old_folder_is_told_and_deletes_nothing(tmp_path):
    saved(tmp_path, linear(), 10, 20)
    with pytest.warns(RuntimeWarning, match=r"nothing was loaded, .* later ones \(10, 20\)"):
        saved(RunFolder(tmp_path, Keep(last=1)), linear(), 5)
    assert (steps_of(tmp_path), steps_of(tmp_path / "aside-1")) == ([5], [10, 20])


def test_after_a_fallback_what_is_saved_next_stays(tmp_path):
    run, model = RunFolder(tmp_path, keep=Keep(last=1)), linear()
    saved(tmp_path, model, 10, 20)
    path = next((tmp_path / "step-000000000020").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.warns(RuntimeWarning, match=r"falling back to step 10; .* moves step 20"):
        load_checkpoint(run, model, fallback=True)
    saved(run, model, 15)
    assert steps_of(tmp_path)[-1] == 15
    assert load_checkpoint(run, model).step == 15
    assert steps_of(tmp_path / "aside-1") == [20]


# -- what is deleted -----------------------------------------------------------------------------


def test_links_are_unlinked_and_what_they_point_to_stays(tmp_path):
    run, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    model = linear()
    saved(run, model, 1)
    (run / "step-000000000001").rename(archive / "one")
    (run / "step-000000000001").symlink_to(archive / "one")
    for name in (f".staging-{'0' * 32}", f".trash-{'1' * 32}"):
        (run / name).symlink_to(archive / "one")
    (archive / "two").mkdir()
    (archive / "two" / "file").write_text("kept")
    (run / f".trash-{'2' * 32}").mkdir()
    (run / f".trash-{'2' * 32}" / "link").symlink_to(archive / "two" / "file")
    before = names_in(archive / "one")
    saved(RunFolder(run, Keep(last=1)), model, 2)
    assert names_in(run) == ["step-000000000002"]
    assert names_in(archive / "one") == before
    assert (archive / "two" / "file").read_text() == "kept"


def test_a_folder_of_another_owner_is_left_and_told(tmp_path, monkeypatch):
    saved(tmp_path, (model := linear()), 1)
    plain = Files.look

    class Strange(Files):
        def look(self, folder, name):
            values = list(plain(self, folder, name))
            return os.stat_result([*values[:4], 12345, *values[5:]])

    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        saved(RunFolder(tmp_path, Keep(last=1), files=Strange()), model, 2)
    assert steps_of(tmp_path) == [1, 2]


# -- who uses the folder -------------------------------------------------------------------------


def test_a_second_process_is_refused_by_name(tmp_path):
    save_spans(tmp_path, arrays(), 1, step=1)
    program = (
        "import sys, numpy; sys.path[:0] = sys.argv[2:]\n"
        "from support.checkpoint_cases import arrays, save_spans\n"
        "print(save_spans(sys.argv[1], arrays(), 1, step=2)[0])"
    )
    command = [
        sys.executable,
        "-c",
        program,
        str(tmp_path),
        os.path.dirname(os.path.dirname(__file__)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    assert f"is in use: process {os.getpid()} on " in done.stdout
    assert steps_of(tmp_path) == [1]


@pytest.mark.long
def test_a_last_save_that_fails_and_is_not_waited_for_ends_with_failure(tmp_path):
    program = (
        "import sys, torch\n"
        "from fullshard.checkpoint import Files\n"
        "from fullshard.torch import RunFolder, save_checkpoint\n"
        "class Full(Files):\n"
        "    def flush(self, file): raise OSError(28, 'No space left on device')\n"
        "run = RunFolder(sys.argv[1], files=Full())\n"
        "save_checkpoint(run, torch.nn.Linear(2, 2), step=7, asynchronous=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=PROCESS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "step 7 was not saved" in done.stderr
    assert "No space left" in done.stderr


# -- paths, steps, moments -----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", None, 3], ids=repr)
def test_paths_that_are_none(path):
    for call in (lambda: save_checkpoint(path, linear(), step=1), lambda: RunFolder(path)):
        with pytest.raises(ConfigurationError, match="a run folder is a path"):
            call()
    with pytest.raises(ConfigurationError, match="a run folder is a path"):
        load_checkpoint(path, linear())


@pytest.mark.parametrize("step", [1.0, True, "1", -1, 10**18])
def test_steps_that_are_none(tmp_path, step):
    for call in (save_checkpoint, load_checkpoint):
        with pytest.raises(ConfigurationError, match="step is a whole number from 0"):
            call(tmp_path, linear(), step=step)
    assert names_in(tmp_path) == []


def test_a_path_as_text_restarts_and_a_later_chdir_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = linear()
    for _ in range(2):
        run = RunFolder("runs/a", background=Background(2**25))
        loaded = load_checkpoint(run, model, if_any=True)
        first = loaded.step + 1 if loaded else 1
        save_checkpoint(run, model, step=first, asynchronous=True)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        save_checkpoint(run, model, step=first + 1)
        monkeypatch.chdir(tmp_path)
    assert steps_of(run.path / ".") == [1, 2, 3, 4]
    assert run.newest().step == 4
    assert RunFolder("runs/b").newest() is None
    assert names_in(tmp_path / "elsewhere") == []


def test_inside_a_forward(tmp_path):
    class Calls(nn.Linear):
        call = staticmethod(lambda model: None)

        def forward(self, x):
            self.call(self)
            return super().forward(x)

    def body(comm):
        model = FullyShardedDataParallel(Calls(2, 2), comm)
        save_checkpoint(tmp_path, model, step=1)
        for call in (
            lambda _: save_checkpoint(tmp_path, model, step=2),
            lambda _: load_checkpoint(tmp_path, model),
        ):
            Calls.call = staticmethod(call)
            with pytest.raises(UsageError, match="while the forward of unit"):
                model(torch.ones(1, 2))
            Calls.call = staticmethod(lambda model: None)

    LocalWorld(1).run(body)
    assert steps_of(tmp_path) == [1]


# -- ratings -------------------------------------------------------------------------------------


def test_a_metric_may_be_a_tensor_or_nested_and_must_be_there(tmp_path):
    for metric, extras in (
        ("loss", [{"loss": torch.tensor(value)} for value in (3.0, 1.0, 2.0, 0.0, 4.0)]),
        ("eval.loss", [{"eval": {"loss": numpy.float32(v)}} for v in (3.0, 1.0, 2.0, 0.0, 4.0)]),
    ):
        folder, model = tmp_path / metric, linear()
        run = RunFolder(folder, Keep(last=1, best=1, metric=metric))
        for step, extra in enumerate(extras):
            save_checkpoint(run, model, step=step, extra=extra)
        assert steps_of(folder) == [3, 4]
        for extra in ({"los": 1.0}, None, {"loss": "1"}, {"eval": 1.0}):
            with pytest.raises(ConfigurationError, match=r"Keep\(metric="):
                save_checkpoint(run, model, step=9, extra=extra)
        assert steps_of(folder) == [3, 4]


# -- settings and numbers ------------------------------------------------------------------------


def trained(kind, **options):
    model = linear()
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options", "other", "why"),
    [
        (torch.optim.AdamW, {}, {"amsgrad": True}, "saved with amsgrad=False .* amsgrad=True here"),
        (torch.optim.AdamW, {"amsgrad": True}, {}, "saved with amsgrad=True .* amsgrad=False here"),
        (torch.optim.RMSprop, {}, {"centered": True}, "saved with centered=False"),
    ],
)
def test_settings_with_state_of_their_own_are_refused_by_name(tmp_path, kind, options, other, why):
    save_checkpoint(tmp_path, *trained(kind, **options), step=1)
    with pytest.raises(CheckpointError, match=why):
        load_checkpoint(tmp_path, *trained(kind, **other))


def test_state_of_adam_is_not_taken_by_adamax(tmp_path):
    save_checkpoint(tmp_path, *trained(torch.optim.Adam), step=1)
    with pytest.raises(CheckpointError, match="saved by Adam and is Adamax here"):
        load_checkpoint(tmp_path, *trained(torch.optim.Adamax))


class Held(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("value", value)


@pytest.mark.parametrize(
    ("stored", "here", "why"),
    [
        (torch.tensor([1.5]), torch.int64, "fractions to whole numbers are not converted"),
        (torch.tensor([2]), torch.float32, "whole numbers to fractions"),
        (torch.tensor([True]), torch.int64, "truth to whole numbers"),
        (torch.tensor([1e300], dtype=torch.float64), torch.float32, "out of the range of F32"),
        (torch.tensor([1e5]), torch.float16, "out of the range of F16"),
        (torch.tensor([500.0]), torch.float8_e4m3fn, "out of the range of F8_E4M3"),
        (torch.tensor([300]), torch.int8, "out of the range of I8"),
        (torch.tensor([-1], dtype=torch.int8), torch.uint8, "out of the range of U8"),
    ],
    ids=str,
)
def test_numbers_are_not_lost_in_silence(tmp_path, stored, here, why):
    save_checkpoint(tmp_path, Held(stored), step=1)
    model = Held(torch.zeros(1).to(here))
    with pytest.raises(CheckpointError, match=why):
        load_checkpoint(tmp_path, model)
    assert model.value.float().item() == 0
    load_checkpoint(tmp_path, model, strict=False)
    assert torch.equal(model.value.double(), stored.to(here).double()) or "F8" in why


# -- the command ---------------------------------------------------------------------------------


def test_a_seal_does_not_hide_damage_and_damage_is_told_by_the_status(tmp_path, capsys):
    saved(tmp_path, (model := linear()), 1)
    seal(tmp_path)
    saved(tmp_path, model, 2)
    path = next((tmp_path / "step-000000000002").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="step-000000000002"):
        command.main(["verify", str(tmp_path), "--step", "2"])
    (tmp_path / "step-000000000002" / "manifest.json").write_text("{}")
    assert command.main(["ls", str(tmp_path)]) == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="it has none"):
        command.main(["verify", str(tmp_path / "empty"), "--all"])
    with pytest.raises(ConfigurationError, match="without '/'"):
        command.main(["import", str(path), str(tmp_path / "new"), "--part", "a/b"])


def test_manifests_of_very_many_boxes_are_judged_in_time():
    rows = [StoredBox(Box((0, n), (9, 1)), 0) for n in range(20_000)]
    assert _tile((9, 20_000), rows)
    assert not _tile((9, 20_000), [*rows[:-1], rows[0]])
    assert not _tile((9, 20_000), rows[:-1])
