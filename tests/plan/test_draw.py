# SPDX-License-Identifier: Apache-2.0
"""Pictures tell what the plan says, as SVG, PNG and text."""

import re
from dataclasses import dataclass
from xml.etree import ElementTree

import pytest

from fullshard.core.text import bytes_text
from fullshard.plan.cluster.read import cluster_of, named_device
from fullshard.plan.draw import (
    Curve,
    draw_curves,
    draw_memory,
    draw_streams,
    memory_lines,
    stream_lines,
    svg_of,
    write_png,
    write_svg,
)
from fullshard.plan.draw.drawing import CATEGORY_COLOURS, nice_ticks
from fullshard.plan.memory import CATEGORIES, forecast_memory
from fullshard.plan.model.named import named_model
from fullshard.plan.run import Run
from fullshard.plan.step.script import write_script

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Busy:
    stream: str
    label: str
    unit: int
    start_s: float
    stop_s: float


RECORDS = [
    Busy("gather", "gather of <a>", 1, 0.0, 0.01),
    Busy("compute", "forward of <a>", 1, 0.01, 0.05),
    Busy("reduce", "reduce of <a>", 1, 0.05, 0.1),
]


@pytest.fixture(scope="module")
def forecast():
    model, run = named_model("nano"), Run(sequence=64)
    cluster = cluster_of(named_device("h100"), 8)
    return forecast_memory(write_script(model, run, cluster), model, run, cluster)


def test_every_category_has_a_colour():
    assert set(CATEGORY_COLOURS) == set(CATEGORIES)
    assert len(set(CATEGORY_COLOURS.values())) == len(CATEGORIES)


def test_the_timeline_has_the_peak_of_the_forecast(forecast):
    samples = forecast.timeline
    peak = max(samples, key=lambda each: each.total_bytes)
    assert peak.bytes == forecast.peak
    assert peak.line == forecast.line
    assert forecast.cause.startswith(peak.label)


def test_memory_as_svg(forecast, tmp_path):
    drawing = draw_memory(forecast.timeline, "a & b", capacity_bytes=2 * forecast.peak_bytes)
    write_svg(drawing, tmp_path / "memory.svg")
    root = ElementTree.fromstring((tmp_path / "memory.svg").read_text("utf-8"))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    told = [each.text for each in root.iter(f"{SVG}title")]
    assert "a & b" in texts
    assert any(bytes_text(forecast.peak_bytes) in text for text in texts)
    assert any(text.startswith("device: ") for text in texts)
    for category, size in forecast.peak.items():
        assert not size or f"{category}: {bytes_text(size)} at the peak" in told
    areas = list(root.iter(f"{SVG}polygon"))
    held = {name for sample in forecast.timeline for name, size in sample.bytes.items() if size}
    assert len(areas) == len(held)
    places = [float(n) for each in areas for n in re.findall(r"[\d.]+", each.get("points"))]
    assert min(places) >= 0
    assert max(places) <= drawing.width


def test_streams_as_svg():
    root = ElementTree.fromstring(svg_of(draw_streams(RECORDS, "a step")))
    bars = [each for each in root.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    told = [each.find(f"{SVG}title").text for each in bars]
    assert told == [
        "forward of <a>: 40.000 ms",
        "gather of <a>: 10.000 ms",
        "reduce of <a>: 50.000 ms",
    ]
    widths = [float(each.get("width")) for each in bars]
    assert widths[2] == pytest.approx(5 * widths[1], rel=0.03)
    assert "40% busy" in {each.text for each in root.iter(f"{SVG}text")}


def test_curves_grow_upwards_and_to_the_right():
    curve = Curve("ideal", ((8, 1.0), (64, 8.0), (512, 64.0)), (0.9, 7, 60), (1.1, 9, 70))
    root = ElementTree.fromstring(svg_of(draw_curves([curve], "scaling", "devices", "tokens/s")))
    lines = {each.get("stroke-width"): each.get("points") for each in root.iter(f"{SVG}polyline")}
    points = [tuple(map(float, pair.split(","))) for pair in lines["2.2"].split()]
    assert points == sorted(points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


def test_png_has_the_drawing_in_its_colours(forecast, tmp_path):
    image_module = pytest.importorskip("PIL.Image", reason="PNG needs the extra plots")
    write_png(draw_memory(forecast.timeline, "memory"), tmp_path / "memory.png", scale=1)
    with image_module.open(tmp_path / "memory.png") as image:
        assert image.size == (960, 420)
        colours = {colour for _, colour in image.getcolors(1 << 20)}
    assert (0xE6, 0x9F, 0x00) in colours  # unit buffers


def test_memory_in_a_terminal(forecast):
    lines = memory_lines(forecast.timeline, capacity_bytes=forecast.peak_bytes + 2**20)
    assert max(map(len, lines)) <= 100
    assert any("1.00 MiB spare" in line for line in lines)
    assert any(bytes_text(forecast.peak_bytes) in line for line in lines)
    short = memory_lines(forecast.timeline, capacity_bytes=forecast.peak_bytes - 2**20)
    assert any("1.00 MiB too little" in line for line in short)
    marked = memory_lines(forecast.timeline, markup=True)
    plain = [re.sub(r"\[[^\]]*\]", "", line) for line in marked]
    assert max(map(len, plain)) <= 100
    assert any("█" in line for line in plain)


def test_streams_in_a_terminal():
    lines = stream_lines(RECORDS, width=51)
    assert lines[0].split() == ["compute", "....1111111111111111...................."]
    assert lines[1].split() == ["gather", "1111...................................."]
    assert lines[-1].endswith("100.0 ms")


def test_ticks_are_round():
    assert nice_ticks(83) == [0, 20, 40, 60, 80]
    assert nice_ticks(0) == [0]
