# SPDX-License-Identifier: Apache-2.0
"""The best configuration on more and more devices: what faults leave, and where hybrid wins."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fullshard.core.errors import ConfigurationError
from fullshard.plan.predict import Prediction
from fullshard.plan.scale import Crossover, ScalePoint, scaling_curve, where_hybrid_wins


def scaled(best: Prediction) -> tuple[tuple[ScalePoint, ...], Crossover | None]:
    """The run of ``best`` from 8 to 16,384 devices, and where FULL_SHARD loses to HYBRID_SHARD.

    The second is None if the run fits into no group of hosts.
    """
    points = scaling_curve(best.model, best.run, best.cluster)
    try:
        return points, where_hybrid_wins(best.model, best.run, best.cluster)
    except ConfigurationError:
        return points, None


def show_scale(console: Console, points: Sequence[ScalePoint], crossover: Crossover | None) -> None:
    """A row for each number of devices."""
    table = Table(
        title="the same on more devices, a day with failures and saves simulated",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for head in ("devices", "fits", "step", "tokens/s", "goodput", "range", "kept a device"):
        table.add_column(head, justify="right", overflow="fold")
    for each in points:
        table.add_row(
            f"{each.devices:,}",
            "yes" if each.prediction.fits else "NO",
            f"{each.prediction.step_s:.2f} s",
            f"{float(f'{each.tokens_per_s:.3g}'):,.0f}",
            f"{each.goodput.goodput:.1%}",
            f"{each.low:.0%}-{each.high:.0%}",
            f"{each.efficiency:.1%}",
        )
    console.print(table)
    if crossover is None:
        return
    if crossover.devices is None:
        console.print(
            f"FULL_SHARD is never slower than HYBRID_SHARD in groups of {crossover.group}"
        )
    else:
        console.print(
            f"HYBRID_SHARD in groups of {crossover.group} is faster from {crossover.devices:,} "
            "devices on (the smallest that was looked at)"
        )


def scale_data(points: Sequence[ScalePoint], crossover: Crossover | None) -> dict[str, Any]:
    """Return both as plain data."""
    return {
        "points": [
            {
                "devices": each.devices,
                "fits": each.prediction.fits,
                "step_s": each.prediction.step_s,
                "goodput": each.goodput.goodput,
                "goodput_range": [each.low, each.high],
                "lost": dict(each.goodput.shares),
                "tokens_per_s": each.tokens_per_s,
                "efficiency": each.efficiency,
            }
            for each in points
        ],
        "hybrid_wins_from": None if crossover is None else crossover.devices,
        "hybrid_group": None if crossover is None else crossover.group,
    }
