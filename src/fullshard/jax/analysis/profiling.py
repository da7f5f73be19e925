# SPDX-License-Identifier: Apache-2.0
"""The time of a step and the shares of its collectives, from the profiler's record."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from fullshard.core.errors import UsageError
from fullshard.core.text import in_columns
from fullshard.jax.analysis.hlo import KINDS, instructions
from fullshard.jax.training.state import TrainState
from fullshard.jax.training.step import TrainStep

__all__ = ["Profile", "profile"]

_CONTAINERS = ("while", "call", "conditional", "async")
"""Operations whose time is that of others inside of them."""


@dataclass(frozen=True)
class Profile:
    """Mean times of a step, in seconds.

    ``by_kind`` has for each kind of collective, and for "computation", the time that a device of
    this process spends in it, the mean over devices. A collective's time begins when the device is
    ready for it, so it holds the wait for the slowest device. Where collectives run beside
    computation the sum is more than ``step_s``.
    """

    step_s: float
    by_kind: Mapping[str, float]

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("what a device does", "ms a step", "of the step")]
        for kind, seconds in sorted(self.by_kind.items(), key=lambda item: -item[1]):
            rows.append((kind, f"{seconds * 1e3:.2f}", f"{seconds / self.step_s:.1%}"))
        rows.append(("the step", f"{self.step_s * 1e3:.2f}", ""))
        return in_columns(rows, right=(1, 2))


def profile(
    step: TrainStep, state: TrainState, batch: Any, steps: int = 3
) -> tuple[TrainState, Profile]:
    """Train ``steps`` steps on ``batch`` under the profiler, after one without: state and times.

    With several processes all must call it. The state given must not be used again.

    Raises:
        UsageError: if the profiler's record has nothing about this program.
    """
    state, loss, _ = step(state, batch)
    loss.block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    text = step.compiled(batch).as_text() or ""
    kinds = {each.name: each.kind for each in instructions(text)}
    times: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as where:
        with jax.profiler.trace(where, profiler_options=options):
            begin = time.perf_counter()
            for _ in range(steps):
                state, loss, _ = step(state, batch)
                loss.block_until_ready()
            step_s = (time.perf_counter() - begin) / steps
        for path in Path(where).rglob("*.xplane.pb"):
            _add_times(ProfileData.from_file(str(path)), kinds, times)
    devices = {device for device, _ in times}
    if not devices:
        raise UsageError("the profiler has no record of the step's operations on this platform")
    by_kind: dict[str, float] = {}
    for (_, kind), seconds in times.items():
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds / len(devices) / steps
    return state, Profile(step_s, by_kind)


def _add_times(
    record: ProfileData, kinds: Mapping[str, str], times: dict[tuple[str, str], float]
) -> None:
    """Add the seconds of the program's own operations, by device and kind."""
    for plane in record.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                kind = kinds.get(str(stats.get("hlo_op", "")), "while")
                if kind not in _CONTAINERS:
                    device = str(stats.get("device_ordinal", plane.name))
                    key = device, kind if kind in KINDS else "computation"
                    times[key] = times.get(key, 0.0) + event.duration_ns / 1e9
