# SPDX-License-Identifier: Apache-2.0
"""The choice of the program that needs least, by what was compiled."""

from collections.abc import Mapping
from typing import Any

from fullshard.jax.analysis.hlo import communication_of, memory_of
from fullshard.jax.compute.context import MODES

__all__ = ["best", "candidates", "choose"]

_NEAR = 1.02
_WAYS = ("whole", "cut", "chunks")


def candidates(step: Any, batch: Any) -> dict[str, Any]:
    """A `TrainStep` in every mode, and with every way to compute over a vocabulary if it has one.

    One in mode "auto" keeps them until it has chosen, so that none is compiled twice.
    """
    if step.rivals:
        return step.rivals
    first = step.variant(mode="weights", vocabulary="whole")
    first.lowered(batch)
    ways = _WAYS if first.has_vocabulary else _WAYS[:1]
    found = {}
    for mode in MODES:
        for way in ways:
            chosen = (step.options.mode, step.options.vocabulary)
            plain = first if (mode, way) == ("weights", "whole") else None
            each = step if chosen == (mode, way) else plain
            name = mode if way == "whole" else f"{mode}, {way}"
            found[name] = each or step.variant(mode=mode, vocabulary=way)
    if step.options.mode == "auto":
        step.rivals = found
    return found


def choose(step: Any, batch: Any) -> Any:
    """The candidate that needs least for batches like this one; all are compiled."""
    found = candidates(step, batch)
    needs = {}
    for name, each in found.items():
        program = each.compiled(batch)
        sent = communication_of(program.as_text() or "", step.mesh.size).sent_bytes
        needs[name] = memory_of(program)["peak"], sent
    return found[best(needs)]


def best(needs: Mapping[str, tuple[int, int]]) -> str:
    """The name of what sends least, of those whose peak is within 2% of the lowest.

    ``needs`` are peak and bytes sent by name.
    """
    lowest = min(peak for peak, _ in needs.values())
    near = [name for name, (peak, _) in needs.items() if peak <= _NEAR * lowest]
    return min(near, key=lambda name: (needs[name][1], needs[name][0]))
