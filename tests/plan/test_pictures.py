# SPDX-License-Identifier: Apache-2.0
"""Pictures tell what the plan says, in files and in a terminal."""

import io

import pytest

pytest.importorskip("rich")
pytest.importorskip("matplotlib", reason="pictures need the extra plots")

from rich.console import Console

from fullshard.core.text import bytes_text
from fullshard.plan.cluster.devices import cluster_of, fitted_constants, named_device
from fullshard.plan.command.terminal import print_memory, print_streams
from fullshard.plan.memory import CATEGORIES, forecast_memory, memory_timeline
from fullshard.plan.model.named import named_model
from fullshard.plan.pictures import (
    CATEGORY_COLOURS,
    KIND_COLOURS,
    draw_memory,
    draw_scaling,
    draw_streams,
    short_names,
    write_picture,
)
from fullshard.plan.run import Recompute, Run, Wrap
from fullshard.plan.scale import scaling_curve
from fullshard.plan.step.clock import Busy, replay
from fullshard.plan.step.script import write_script

RECORDS = [
    Busy("gather", "gather", "a", 1, 0.0, 0.01),
    Busy("compute", "forward", "a", 1, 0.01, 0.05),
    Busy("reduce", "reduce", "a", 1, 0.05, 0.1),
]


@pytest.fixture(scope="module")
def step():
    model, cluster = named_model("nano"), cluster_of(named_device("h100"), 8)
    run = Run(sequence=64, wrap=Wrap.BLOCK_AND_ENDS, recompute=Recompute.FULL)
    script = write_script(model, run, cluster)
    timeline = replay(script, run, cluster, fitted_constants(), record=True)
    forecast = forecast_memory(script, model, run, cluster)
    return forecast, timeline, script, memory_timeline(script, run, cluster)


def texts_of(figure):
    figure.draw_without_rendering()
    return {each.get_text() for each in figure.findobj(lambda part: hasattr(part, "get_text"))}


def test_every_category_has_a_colour():
    assert set(CATEGORY_COLOURS) == set(CATEGORIES)
    assert len(set(CATEGORY_COLOURS.values())) == len(CATEGORIES)


def test_the_timeline_has_the_peak_of_the_forecast(step):
    forecast, _, _, samples = step
    peak = max(samples, key=lambda each: each.total_bytes)
    assert peak.bytes == forecast.peak
    assert peak.line == forecast.line
    assert forecast.cause.startswith(peak.label)


@pytest.mark.long
def test_an_svg_has_the_same_bytes_each_time(step, tmp_path):
    _, _, _, samples = step
    for name in ("a.svg", "b.svg", "a.png"):
        write_picture(draw_memory(samples, "a title"), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.long
def test_the_picture_of_memory_names_the_peak_and_what_it_is_of(step, tmp_path):
    forecast, _, _, samples = step
    figure = draw_memory(samples, "a & b", capacity_bytes=2 * forecast.peak_bytes)
    texts = texts_of(figure)
    assert {"a & b", "forward", "backward"} <= texts
    assert any(bytes_text(forecast.peak_bytes) in each for each in texts)
    assert f"device: {bytes_text(2 * forecast.peak_bytes)}" in texts
    assert f"logits and loss: {bytes_text(forecast.peak['logits and loss'])}" in texts
    assert forecast.cause.partition(":")[0] in texts  # a line around the peak by its name
    for ending, begin in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        write_picture(figure, tmp_path / f"memory.{ending}")
        assert (tmp_path / f"memory.{ending}").read_bytes().startswith(begin)


def test_the_picture_of_streams_has_a_legend_and_names_units(step):
    _, timeline, script, _ = step
    units = [unit.path or "(root)" for unit in script.units]
    texts = texts_of(draw_streams(timeline.records, units, "a step", step_s=timeline.step_s))
    assert {"forward", "recomputation", "backward", "gather", "reduce"} <= texts
    assert "output" in texts
    assert any(each.startswith("blocks.") for each in texts)
    shares = texts_of(draw_streams(RECORDS, ["(root)", "a"], "a step"))
    assert {"compute\n40% busy", "gather\n10% busy", "reduce\n50% busy"} <= shares


def test_the_picture_of_scaling_has_both_curves():
    model, cluster = named_model("gpt2-124m"), cluster_of(named_device("h100"), 8)
    run = Run(micro_batch=8, sequence=1024)
    points = scaling_curve(model, run, cluster, devices=(8, 256), hours=2)
    assert {"without faults", "kept, with faults", "256"} <= texts_of(draw_scaling(points, "t"))


def printed(function, *args, width=100, colours=False, **more):
    file = io.StringIO()
    system = "truecolor" if colours else None
    function(Console(file=file, width=width, color_system=system, highlight=False), *args, **more)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 200])
def test_memory_in_a_terminal(step, width):
    forecast, _, _, samples = step
    spare = forecast.peak_bytes + 2**20
    lines = printed(print_memory, samples, width=width, capacity_bytes=spare)
    assert max(map(len, lines)) <= width
    assert any("1.00 MiB spare" in line for line in lines)
    assert any(bytes_text(forecast.peak_bytes) in line for line in lines)
    short = printed(print_memory, samples, capacity_bytes=spare - 2**21)
    assert any("1.00 MiB too little" in line for line in short)
    assert not any("█" in line for line in lines)
    coloured = printed(print_memory, samples, colours=True, capacity_bytes=spare)
    assert any("█" in line for line in coloured)


def test_streams_in_a_terminal():
    lines = printed(print_streams, RECORDS, ["(root)", "a"], width=51)
    assert lines[0].split() == ["forward", "....1111111111111111...................."]
    assert lines[1].split() == ["gather", "1111...................................."]
    assert lines[-2].endswith("100.0 ms")
    assert lines[-1] == "units: 0 (root), 1 a"
    assert set(KIND_COLOURS) == {"forward", "again", "backward", "gather", "reduce"}


def test_names_leave_out_what_all_units_share():
    assert short_names(["(root)", "model.layers.0", "model.layers.1"]) == [
        "(root)",
        "layers.0",
        "layers.1",
    ]
    assert short_names(["a.b", "c.d"]) == ["a.b", "c.d"]
