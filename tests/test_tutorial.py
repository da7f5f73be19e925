# SPDX-License-Identifier: Apache-2.0
"""Pages that are typed here as their reader would: their files written, their commands run.

That takes ten processes each, so it is done in thorough runs; else files are compiled only, and
commands looked up.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.limits import PROCESS_S

from fullshard.cli import main

DOCS = Path(__file__).parent.parent / "docs"


SMALLER = {"range(150)": "range(15)", "60, 12, 64": "60, 12, 16"}  # the base; samples of a step


def blocks_of(page):
    """(language, file name, text) of each block of Python or a console."""
    text = (DOCS / page).read_text()
    return re.findall(r"^```(python|console)(?: file=(\S+))?\n(.*?)^```", text, re.M | re.S)


@pytest.mark.parametrize("page", ["tutorial.md", "howto/huggingface.md"])
def test_commands_are_there_and_files_compile(page, capsys):
    files = set()
    for language, name, body in blocks_of(page):
        if language == "python":
            files.add(name)
            compile(body, name, "exec")
            continue
        for line in re.sub(r"^\$ (\w+=\S+ )?", "", body, flags=re.M).splitlines():
            command, *words = line.split()
            assert command in ("python", "torchrun", "fullshard")
            assert {word for word in words if word.endswith(".py")} <= files
            if command == "fullshard":
                with pytest.raises(SystemExit, match="0"):
                    main([words[0], "--help"])
                options = {word for word in words if word.startswith("--")}
                assert options <= set(capsys.readouterr().out.replace(",", " ").split())


def outputs_of(page, folder, changes):
    """Run the console blocks of a page, its files in ``folder``; return what each prints.

    ``changes`` are texts that its files must have, and what stands there instead.
    """
    changed = set()
    tools = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun then takes a free port, and not always the same
    }
    outputs = []
    for language, name, body in blocks_of(page):
        if language == "python":
            for old in changes.keys() - changed:
                if old in body:
                    changed.add(old)
                    body = body.replace(old, changes[old])
            (folder / name).write_text(body)
            continue
        typed = "".join(line.removeprefix("$ ") for line in body.splitlines(keepends=True))
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert changed == changes.keys()
    return outputs


@pytest.mark.thorough
def test_every_step_of_the_tutorial_works(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    made, killed, resumed, reported, generated = outputs_of("tutorial.md", tmp_path, SMALLER)
    assert "saved base" in made
    told = re.compile(r"^step (\d+), loss", re.M)
    assert told.findall(killed) == ["10", "20"]
    assert re.findall(r"^step-(\d+)", killed, re.M) == ["000000000010", "000000000020"]
    assert told.findall(resumed) == ["30", "40", "50", "60"]
    assert "lost work" in reported
    assert "started 2 times" in reported
    assert (tmp_path / "tuned" / "model.safetensors").exists()
    assert "def " in generated


@pytest.mark.thorough
def test_the_page_on_hugging_faces_trainer_works(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    trained, resumed = outputs_of("howto/huggingface.md", tmp_path, {})
    losses = re.compile(r"'loss': '([\d.]+)'")
    assert len(losses.findall(trained)) == 4
    assert losses.findall(resumed) == losses.findall(trained)[2:]
    assert trained.count("ShardedDTensor") == 2
