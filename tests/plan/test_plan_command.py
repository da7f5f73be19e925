# SPDX-License-Identifier: Apache-2.0
"""``fullshard plan`` from the outside: what it prints, writes, refuses, and how fast it is."""

import json
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from support.golden import check_golden
from support.limits import PROCESS_S

pytest.importorskip("rich")

from fullshard.cli import main
from fullshard.train.config import resolve

SMALL = ["plan", "gpt2-124m", "--devices", "8", "--sequence", "512"]


GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 200])
def test_all_of_it_fits_the_terminal_and_is_as_before(width, capsys, monkeypatch):
    """In a pipe, without colours."""
    monkeypatch.setenv("COLUMNS", str(width))
    more = ["--what-if", "recompute=none,full", "--tokens", "1e11", "--timeline", "--scale"]
    assert main([*SMALL, *more]) == 0
    check_golden(GOLDEN / f"plan_{width}.txt", capsys.readouterr().out, width)


def test_help_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_speeds_fall_and_percentages_agree(capsys):
    assert main(["plan", "llama3-8b", "--devices", "8", "--json", "--top", "40"]) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    speeds = [each["tokens_per_s_told"] for each in ranked]
    assert speeds == sorted(speeds, reverse=True)
    for faster, slower in pairwise(ranked):
        if faster["tokens_per_s_told"] == slower["tokens_per_s_told"]:
            assert faster["memory"]["peak_bytes"] <= slower["memory"]["peak_bytes"]
    for each in ranked:
        assert each["tokens_per_s_told"] == pytest.approx(each["tokens_per_s_per_device"], rel=0.01)
    for each in ranked:
        memory = each["memory"]
        largest = memory["cause"].rpartition(" are ")[2]
        share = memory["by_category"][largest] / memory["peak_bytes"]
        assert f": {share:.0%} are" in memory["cause"]


@pytest.mark.long
def test_memory_of_the_host_is_told(capsys):
    asked = ["plan", "llama3-8b", "--devices", "8", "--offload", "params", "--recompute", "full"]
    assert main(asked) == 0
    assert "memory of each host for what is offloaded" in capsys.readouterr().out.replace("\n", " ")
    assert main([*asked, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["ranked"][0]["memory"]
    assert memory["host_bytes_per_host"] == 8 * memory["host_bytes"] > 0


@pytest.mark.parametrize("wrap", ["none", "block", "block+ends", "part"])
@pytest.mark.parametrize("more", [[], ["--replicas", "2"], ["--strategy", "NO_SHARD"]])
def test_recipes_are_python_in_the_classes_of_the_user(wrap, more, tmp_path, capsys):
    config = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    fixed = ["--offload", "params", "--recompute", "full", "--micro-batch", "1"]
    assert main(["plan", str(tmp_path), "--wrap", wrap, *more, *fixed, "--json"]) == 0
    code = json.loads(capsys.readouterr().out)["code"]
    for each in code.values():
        compile(each, "recipe", "exec")
        assert max(map(len, each.splitlines())) <= 80
    names = {"none": "", "part": "(Qwen3Attention, Qwen3MLP)"}.get(wrap, "Qwen3DecoderLayer")
    assert names in code["wrapper"]
    loop = "for block in model.model.layers:\n"
    assert (loop in code["fully_shard"]) == (wrap != "none")


def test_json_tells_the_same(capsys):
    assert main([*SMALL, "--json", "--top", "3", "--what-if", "prefetch=0,1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["ranked"]) == 3
    best = told["ranked"][0]
    assert best["step_interval_s"][0] < best["step_s"] < best["step_interval_s"][1]
    assert sum(best["memory"]["by_category"].values()) == best["memory"]["peak_bytes"]
    assert [each["prefetch"] for each in told["what_if"]["prefetch"]] == ["0", "1"]


@pytest.mark.long
def test_pictures_and_settings_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need the extra plots")
    config = tmp_path / "train.toml"
    asked = ["plan", "nano", "--devices", "2", "--recompute", "none", "--micro-batch", "2"]
    fixed = ["--strategy", "FULL_SHARD", "--accumulate", "1", "--offload", "none"]
    drawn = ["--draw", str(tmp_path), "--config", str(config)]
    assert main([*asked, *fixed, *drawn]) == 0
    written = {each.name for each in tmp_path.iterdir()} - {"train.toml"}
    assert written == {f"{name}.{end}" for name in ("memory", "streams") for end in ("svg", "png")}
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
        (["llama3-8b", "--inside", "1e-308"], "must be above 0"),
        (["llama3-8b", "--memory", "nan"], "--memory is in GiB, above 0"),
        (["llama3-8b", "--memory", "inf"], "--memory is in GiB, above 0"),
        (["llama3-8b", "--memory", "1e308"], "--memory is in GiB, above 0"),
        (["llama3-8b", "--tokens", "nan"], "--tokens must be between 0 and"),
    ],
)
def test_bad_input_is_refused_with_the_nearest_valid_choice(asked, said, capsys):
    assert main(["plan", *asked]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.long
def test_planning_loads_no_framework():
    code = (
        "import sys; from fullshard.cli import main; "
        "main(['plan', 'gpt2-124m', '--devices', '8', '--json']); "
        "assert not {'torch', 'jax', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PROCESS_S)
    assert done.returncode == 0, done.stderr.decode()
