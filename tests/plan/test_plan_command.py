# SPDX-License-Identifier: Apache-2.0
"""``fullshard plan`` from the outside: what it prints, writes, refuses, and how fast it is."""

import json
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("rich")

from fullshard.cli import main
from fullshard.train.config import resolve

SMALL = ["plan", "gpt2-124m", "--devices", "8", "--sequence", "512"]


def test_everything_fits_into_a_hundred_columns(capsys):
    more = ["--what-if", "recompute=none,full", "--tokens", "1e11", "--timeline"]
    assert main([*SMALL, *more]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    for word in ("FULL_SHARD", "tokens/s", "rejected", "what if recompute", "device-hours", "peak"):
        assert word in out
    assert "…" not in out.partition("the best")[0]  # no cell of the ranked table is cut


def test_json_tells_the_same(capsys):
    assert main([*SMALL, "--json", "--top", "3", "--what-if", "prefetch=0,1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["ranked"]) == 3
    best = told["ranked"][0]
    assert best["step_interval_s"][0] < best["step_s"] < best["step_interval_s"][1]
    assert sum(best["memory"]["by_category"].values()) == best["memory"]["peak_bytes"]
    assert [each["prefetch"] for each in told["what_if"]["prefetch"]] == ["0", "1"]


def test_pictures_and_settings_are_written(tmp_path, capsys):
    config = tmp_path / "train.toml"
    asked = ["plan", "nano", "--devices", "2", "--recompute", "none", "--micro-batch", "2"]
    fixed = ["--strategy", "FULL_SHARD", "--accumulate", "1", "--offload", "none"]
    drawn = ["--draw", str(tmp_path), "--config", str(config)]
    assert main([*asked, *fixed, *drawn]) == 0
    assert (tmp_path / "memory.svg").read_text().startswith("<svg")
    assert (tmp_path / "streams.svg").read_text().startswith("<svg")
    settings = resolve(str(config), [], None, None)
    assert (settings.model.preset, settings.train.batch) == ("nano", 4)
    assert tomllib.loads(config.read_text())["shard"]["strategy"] == "FULL_SHARD"


def test_what_training_lacks_is_not_written(tmp_path, capsys):
    assert main([*SMALL, "--recompute", "full", "--config", str(tmp_path / "a.toml")]) == 1
    assert "does not have recompute" in capsys.readouterr().err
    assert not (tmp_path / "a.toml").exists()


def test_a_run_that_does_not_fit_gets_its_smallest_change(capsys):
    asked = ["plan", "llama3-8b", "--devices", "8", "--micro-batch", "2", "--recompute", "none"]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert "the smallest change that fits" in out
    assert "the least is" in err


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["lama3-8b"], "did you mean 'llama3-8b'"),
        (["llama3-8b", "--device", "h10"], "did you mean 'h100'"),
        (["llama3-8b", "--devices", "12"], "take 8 or 16"),
        (["llama3-8b", "--devices", "-1"], "at least 1, got -1"),
        (["llama3-8b", "--global-batch", "30"], "the nearest that can is 32"),
        (["llama3-8b", "--replicas", "3"], "the nearest that divides is 2"),
        (["llama3-8b", "--strategy", "FULLSHARD"], "did you mean 'FULL_SHARD'"),
        (["llama3-8b", "--sequence", "-5"], "sequence must be a whole number"),
        (["llama3-8b", "--what-if", "colour=red"], "setting='colour'"),
        (["llama3-8b", "--between", "-1"], "must be above 0"),
    ],
)
def test_bad_input_is_refused_with_the_nearest_valid_choice(asked, said, capsys):
    assert main(["plan", *asked]) == 2
    assert said in capsys.readouterr().err


def test_planning_loads_no_framework():
    code = (
        "import sys; from fullshard.cli import main; "
        "main(['plan', 'gpt2-124m', '--devices', '8', '--json']); "
        "assert not {'torch', 'jax', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
