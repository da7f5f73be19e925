# SPDX-License-Identifier: Apache-2.0
"""The command ``fullshard plan``: searches, answers, draws, prints."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import write_whole
from fullshard.plan.choose.changes import smallest_change, what_if
from fullshard.plan.choose.search import search, usable_bytes
from fullshard.plan.choose.settings import Setup, describe
from fullshard.plan.choose.space import with_batch
from fullshard.plan.command.arguments import Asked, parse
from fullshard.plan.command.data import answers_data, choice_data, train_settings
from fullshard.plan.command.scale import scale_data, scaled, show_scale
from fullshard.plan.command.show import show_answers, show_change, show_choice
from fullshard.plan.command.terminal import print_memory, print_streams
from fullshard.plan.memory import memory_timeline
from fullshard.plan.pictures import draw_memory, draw_scaling, draw_streams, write_picture
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.scale import ScalePoint


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    asked = parse(argv)
    console = Console(highlight=False)
    _say_what_was_given(asked, console)
    choice = search(asked.model, asked.space, asked.setup.cluster, budget_bytes=asked.budget_bytes)
    best = Setup(choice.best.run, choice.cluster)
    answers = {key: what_if(asked.model, best, key, values) for key, values in asked.questions}
    grown = scaled(choice.best) if asked.scale else None
    if asked.as_json:
        data = choice_data(choice, asked.tokens, asked.top)
        data["what_if"] = {key: answers_data(key, found) for key, found in answers.items()}
        if grown is not None:
            data["scale"] = scale_data(*grown)
        print(json.dumps(data, indent=2))
    else:
        show_choice(console, choice, asked.tokens, asked.top)
        for key, found in answers.items():
            show_answers(console, key, found, choice.best)
        if grown is not None:
            show_scale(console, *grown)
    if asked.timeline and not asked.as_json:
        _show_step(console, choice.best)
    if asked.draw is not None:
        _draw(choice.best, () if grown is None else grown[0], asked.draw)
    if asked.config is not None:
        write_whole(asked.config, train_settings(choice))
    return 0


def _say_what_was_given(asked: Asked, console: Console) -> None:
    """Say if a run that is fixed but for its units fits, and the change with which it does."""
    space = asked.space
    if "micro_batch" in space.free or "recompute" in space.free:
        return
    cluster = asked.setup.cluster
    space.check(cluster)
    run = with_batch(space.base, space.base.micro_batch, space.global_batch, cluster)
    prediction = predict(asked.model, run, cluster)
    budget = asked.budget_bytes or usable_bytes(cluster)
    if prediction.memory.peak_bytes <= budget:
        return
    change = smallest_change(asked.model, run, cluster, budget_bytes=budget)
    if asked.as_json:
        if change is None:
            return
        words = "; ".join(change.words)
        raise ConfigurationError(f"{describe(run)} does not fit; the smallest change: {words}")
    show_change(console, prediction, change)


def _show_step(console: Console, best: Prediction) -> None:
    """Print memory and streams over a step."""
    samples = memory_timeline(best.step.script, best.run, best.cluster)
    print_memory(console, samples, capacity_bytes=best.cluster.device.memory_bytes)
    print_streams(console, best.step.records(), _unit_names(best))


def _unit_names(best: Prediction) -> list[str]:
    return [unit.path or "(root)" for unit in best.step.script.units]


def _draw(best: Prediction, points: Sequence[ScalePoint], folder: Path) -> None:
    """Write the pictures into ``folder``, as SVG and as PNG."""
    title = f"{best.model.name}: {describe(best.run)}"
    samples = memory_timeline(best.step.script, best.run, best.cluster)
    capacity = best.cluster.device.memory_bytes
    names, records = _unit_names(best), best.step.records()
    figures = {
        "memory": draw_memory(samples, title, capacity_bytes=capacity),
        "streams": draw_streams(records, names, title, step_s=best.step_s),
    }
    if points:
        figures["scaling"] = draw_scaling(points, title)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        for ending in ("svg", "png"):
            write_picture(figure, folder / f"{name}.{ending}")
