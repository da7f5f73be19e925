# SPDX-License-Identifier: Apache-2.0
"""The choice of the program that needs least, by what was compiled."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from jax.sharding import Mesh

from fullshard.jax.analysis.hlo import communication_of, memory_of
from fullshard.jax.compute.context import MODES

__all__ = ["Candidate", "best", "candidates", "choose"]

_NEAR = 1.02
_WAYS = ("whole", "cut", "chunks")


class Candidate(Protocol):
    """A step that can be compiled in other modes: `fullshard.jax.training.step.TrainStep`."""

    options: Any
    rivals: dict[str, Any]

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on."""

    @property
    def has_vocabulary(self) -> bool:
        """True if the traced loss computes over a vocabulary."""

    @property
    def variant(self) -> Callable[..., Any]:
        """Makes the same step with other options."""

    def lowered(self, batch: Any) -> Any:
        """The step's program, traced for batches like this one."""

    def compiled(self, batch: Any) -> Any:
        """The step's program, compiled for batches like this one."""


_Step = TypeVar("_Step", bound=Candidate)


def candidates(step: _Step, batch: Any) -> dict[str, _Step]:
    """The step in every mode, and with every way to compute over a vocabulary if it has one.

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


def choose(step: _Step, batch: Any) -> _Step:
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
