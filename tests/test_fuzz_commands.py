# SPDX-License-Identifier: Apache-2.0
"""Throw hostile arguments and files at every command: a sentence and a status, nothing changed.

``FULLSHARD_FUZZ_COMMANDS=0:7000`` tries those seeds, which take turns over the eight commands; a
sample is tried without it.
"""

import hashlib
import os
import random
import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from fullshard.checkpoint import import_safetensors
from fullshard.cli import _COMMANDS, main
from fullshard.core.errors import CommunicationError
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.train.torch.run import RankWorld

FIRST, LAST = map(int, os.environ.get("FULLSHARD_FUZZ_COMMANDS", "0:24").split(":"))


def words(text):
    return text.split()


NUMBERS = [
    *words("0 -1 1 2 3 1e308 -1e308 nan inf -inf 1e-308 0x10 1.5 ٣ 1_000 2**40 1e 999999999"),
    *("", " ", "9" * 30, "9" * 5000, "-" + "9" * 30),
]
SIZES = ["0", "4MiB", "999999999999GiB", "-1KiB", "1e9", "KiB", "4" * 40 + "g", "1.5MiB", "", "nan"]
TEXTS = [
    *words("../.. / - -- --- %s%n {} $(id) ' a/b null = a= =b a.b="),
    *("", " ", "\n", "a\nb", "x" * 300, "x" * 5000, "é" * 50, "\x1b[2J", "[" * 3000, '"""'),
]
FILES = [
    *words("missing missing/deeper empty binary bad.toml deep.toml wrong.toml . bad.json"),
    *words(
        "deep.json list.json huge.json weights.safetensors forged.safetensors folder dangling loop"
    ),
    *words("script.py broken.py run run/step-000000000003 damaged forged cut zeros"),
    *("x\0y", "x" * 300, "/proc/self/mem", "/dev/null"),
]
SETTINGS = [
    *words("optim.lr optim.learning_rate optim train.seed train.steps train.batch train.dtype"),
    *words("train.engine train.initial_weights train.on_nonfinite model.name model.preset"),
    *words("model.context data.paths data.validation_share shard.strategy checkpoint.resume"),
    *words("checkpoint.minutes log.folder log.name log.record log.report log.trace"),
    *("nonsense.key", "a.b.c", ""),
]
# Half of what is to be trained has one thing wrong at most.
RIGHT = [
    *words("optim.lr=0.01 train.steps=2 model.name=mnist model.preset=nano train.engine=jax"),
    *words("checkpoint.resume=auto train.dtype=bfloat16 log.name=a shard.strategy=NO_SHARD"),
]
WITH_FILES = ["data.paths", "train.initial_weights", "checkpoint.resume", "log.folder"]
MODELS = ["llama3-8b", "gpt2-124m", "nano", "llama-3-8B", "no-such-model", "t5-3b"]
VALUES = {"number": NUMBERS, "size": SIZES, "text": TEXTS, "file": FILES, "model": MODELS}

# Positional arguments, and options with what they take ("" for a flag).
COMMANDS = {
    "train": (
        ["setting", "setting", "file"],
        {"--model": "text", "--nproc": "number", "--engine": "text", "--resume": "file"},
    ),
    "run": (
        ["file", "text"],
        {
            **dict.fromkeys(("--nproc", "--nnodes", "--max-restarts", "--node-rank"), "number"),
            **dict.fromkeys(("--rdzv-backend", "--rdzv-endpoint", "--rdzv-conf", "-m"), "text"),
            **dict.fromkeys(("--master-port", "--monitor-interval"), "number"),
            **dict.fromkeys(("--no-python", "--no-launch", "--run-path"), ""),
        },
    ),
    "plan": (
        ["model"],
        {
            **dict.fromkeys(("--devices", "--per-host", "--inside", "--between"), "number"),
            **dict.fromkeys(("--memory", "--tokens", "--top", "--micro-batch"), "number"),
            **dict.fromkeys(("--sequence", "--global-batch", "--lora-rank"), "number"),
            **dict.fromkeys(("--device", "--strategy", "--recompute", "--what-if"), "text"),
            **dict.fromkeys(("--json", "--timeline"), ""),
            "--draw": "file",
            "--config": "file",
        },
    ),
    "calibrate": (["text"], {"--nproc": "number", "--threads": "number", "--out": "file"}),
    "doctor": (["file"], {"--nproc": "number", "--size": "size", "--json": "", "--no-links": ""}),
    "prove": (["text"], {"--only": "text", "--out": "file", "--slow": "", "--fast": "number"}),
    "report": (
        ["file", "file"],
        {"--json": "", "--html": "file", "--png": "file", "--events": "file"},
    ),
    "ckpt": (
        ["verb", "file", "file"],
        {
            **dict.fromkeys(("--step", "--world", "--file-bytes"), "number"),
            **dict.fromkeys(("--part", "--format"), "text"),
            "--all": "",
        },
    ),
}
VERBS = ["ls", "verify", "seal", "diff", "reshard", "export", "import", "nonsense", ""]


def random_arguments(seed):
    draw = random.Random(seed)
    name = list(COMMANDS)[seed % len(COMMANDS)]
    places, options = COMMANDS[name]

    def value(kind):
        if draw.random() < 0.1:
            kind = draw.choice(list(VALUES))
        if kind == "verb":
            return draw.choice(VERBS)
        if kind == "setting" and draw.random() < 0.5:
            return f"{draw.choice(WITH_FILES)}={draw.choice(FILES)}"
        if kind == "setting":
            any_kind = draw.choice(list(VALUES.values()))
            return f"{draw.choice(SETTINGS)}={draw.choice(any_kind)}"
        if kind == "model" and draw.random() < 0.3:
            kind = "file"
        return draw.choice(VALUES[kind])

    if name == "train" and draw.random() < 0.5:
        return [name, *draw.sample(RIGHT, 2), value("setting")]
    arguments = [value(kind) for kind in places if draw.random() < 0.85]
    for option in draw.sample(list(options), draw.randint(0, min(3, len(options)))):
        at = draw.randint(0, len(arguments))
        taken = [option] if not options[option] else [option, value(options[option])]
        if draw.random() < 0.1:
            taken = [option + draw.choice(["x", "=", "="])]
        arguments[at:at] = taken
    if draw.random() < 0.1:
        name = draw.choice(["pln", "trian", "", "--", "ckpts", "\n"])
    return [name, *arguments]


def test_every_command_is_tried():
    assert COMMANDS.keys() == _COMMANDS.keys()


WRITING = {
    "plan": ["plan", "nano", "--devices", "2", "--config"],
    "calibrate": ["calibrate", "--out"],
    "ckpt": ["ckpt", "export", "run"],
}


@pytest.fixture(scope="module")
def one_rank():
    """Join a group of one rank in this process, and leave it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankWorld(ProcessGroupComm(dist.group.WORLD), torch.device("cpu"))
    dist.destroy_process_group()


@pytest.fixture
def world(tmp_path, monkeypatch, one_rank):
    """Lay out good, damaged and forged files; let nothing start processes or work for minutes.

    Training goes as far as its first step, on one rank of this process.
    """
    texts = {
        "empty": "",
        "bad.toml": "[train\nsteps = = 3",
        "deep.toml": "a = " + "[" * 4000,
        "wrong.toml": "[train]\nsteps = 'many'\n",
        "bad.json": "{",
        "deep.json": "[" * 100_000,
        "list.json": "[1, 2]",
        "huge.json": '{"model_type": "llama", "num_hidden_layers": 1e400, "hidden_size": -5}',
        "script.py": "import torch\n",
        "broken.py": "def (:\n",
        "forged.safetensors": "\xff" * 64,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "zeros").write_bytes(b"\0" * 4096)
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    weights = {"a.weight": np.arange(12, dtype=np.float32).reshape(4, 3)}
    save_file(weights, tmp_path / "weights.safetensors")
    for run in ("run", "damaged", "forged", "cut"):
        import_safetensors(tmp_path / "weights.safetensors", tmp_path / run, 3, "model")
    for run, change in (
        ("damaged", lambda data: data[:-1] + b"x"),
        ("cut", lambda data: data[: len(data) // 2]),
    ):
        for path in (tmp_path / run).rglob("*.safetensors"):
            path.write_bytes(change(path.read_bytes()))
    for path in (tmp_path / "forged").rglob("manifest.json"):
        path.write_text(re.sub(r'"world": *1', f'"world": {2**40}', path.read_text()))
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)

    def stop(*arguments, **options):
        raise CommunicationError("would start now")

    def begin(run, reporter, checkpoints):
        checkpoints.resume()
        stop()

    def run_here(function, arguments, nproc, **options):
        return function(*arguments)

    monkeypatch.setattr("fullshard.train.torch.launch.run_local_ranks", run_here)
    monkeypatch.setattr("fullshard.train.torch.launch.joined", lambda **_: nullcontext(one_rank))
    monkeypatch.setattr("fullshard.train.loop.fit", begin)
    for place in (
        "fullshard.doctor.calibration.run_local_ranks",
        "fullshard.doctor.calibration.calibrate",
        "fullshard.doctor.command.measure_locally",
        "fullshard.prove.command.prove_losses",
        "fullshard.prove.command.prove_memory",
        "fullshard.prove.command.prove_order",
        "fullshard.run.run",
        "os.execv",
    ):
        monkeypatch.setattr(place, stop)
    return tmp_path


def contents(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


@pytest.mark.parametrize("file", ["bad.toml", "weights.safetensors", "run", "dangling"])
@pytest.mark.parametrize("command", WRITING)
def test_a_command_writes_over_nothing(world, capsys, command, file):
    before = contents(world)
    assert main([*WRITING[command], file]) == 2
    assert "there" in capsys.readouterr().err
    assert contents(world) == before


@pytest.mark.long
@pytest.mark.parametrize("link", ["dangling", "dangling/deeper", "loop"])
def test_a_link_to_no_folder_ends_training_at_once(world, capsys, link):
    assert main(["train", f"log.folder={link}"]) == 2
    assert f"cannot make the run folder '{link}/gpt-nano" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_command_ends_with_a_sentence_and_changes_nothing(world, capsys, seed):
    arguments = random_arguments(seed)
    before = contents(world)
    with warnings.catch_warnings(action="ignore"):
        try:
            status = main(arguments)
        except SystemExit as left:  # argparse
            status = left.code
    out, err = capsys.readouterr()
    after = contents(world)
    assert status in (0, 1, 2), arguments
    assert "Traceback" not in out + err, arguments
    assert {path: after.get(path) for path in before} == before, arguments
    if status:
        assert out.strip() or err.strip(), arguments
    if status == 2:
        assert set(after) == set(before), (arguments, set(after) - set(before))
        assert Path(err.strip().splitlines()[-1]), arguments
