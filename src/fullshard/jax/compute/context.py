# SPDX-License-Identifier: Apache-2.0
"""The step that is being traced, for the helpers that a loss function calls."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fullshard.core.spec import ParamSpec
from fullshard.jax.arrays.mesh import MeshAxes
from fullshard.jax.arrays.rule import Axis, Placement, place

__all__ = ["Tracing", "current", "tracing"]


@dataclass
class Tracing:
    """The facts that helpers need while a loss function is traced.

    ``plain`` makes them compute as they would outside of a step. ``notes`` are what they have to
    say; ``mixing`` has, when layers are checked, by name how far a layer's results for a part of
    the batch were from those for all of it.
    """

    axes: MeshAxes
    placements: Mapping[str, Placement]
    reduce: Any = None  # the dtype in which gradients are summed; None: their own
    remat: Any = True
    plain: bool = False
    notes: list[str] = field(default_factory=list)
    mixing: dict[str, float] | None = None

    def rests(self, shape: tuple[int, ...], dtype: Any) -> tuple[Axis, ...]:
        """The cut of a weight of this shape, or of a slice of a stack of such, as the rule has it.

        Where several arrays of one shape are cut in different ways, the default rule answers; XLA
        then moves what lies otherwise.
        """
        alike = {
            axes
            for each in self.placements.values()
            for whole, axes in ((each.spec.shape, each.axes), (each.spec.shape[1:], each.axes[1:]))
            if whole == shape and len(each.axes) - len(axes) <= (each.axes[:1] == (None,))
        }
        if len(alike) == 1:
            return alike.pop()
        return place([ParamSpec("weight", shape, str(dtype))], self.axes)[0].axes


_tracing: ContextVar[Tracing | None] = ContextVar("fullshard_jax_tracing", default=None)


def current() -> Tracing | None:
    """The step whose loss is being traced, if its helpers are to act; else None."""
    now = _tracing.get()
    return None if now is None or now.plain else now


@contextmanager
def tracing(now: Tracing | None) -> Iterator[None]:
    """Make ``now`` the current one."""
    token = _tracing.set(now)
    try:
        yield
    finally:
        _tracing.reset(token)
