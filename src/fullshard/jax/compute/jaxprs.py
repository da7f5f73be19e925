# SPDX-License-Identifier: Apache-2.0
"""Parts of a trace as traces of their own, by what `jax.extend.core` offers."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jax_core

__all__ = ["call", "is_literal", "part"]


def part(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """A jaxpr of these operations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    said = jax_core.DebugInfo(
        "fullshard", "part of a step", ("",) * len(invars), ("",) * len(outvars)
    )
    return jax_core.Jaxpr((), list(invars), list(outvars), list(eqns), effects, said)


def call(jaxpr: Any, *args: Any) -> list[Any]:
    """The results of a jaxpr without constants, with all rules of differentiation."""
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(jaxpr, ()))(*args)


def is_literal(atom: Any) -> bool:
    """Whether an operand stands in the trace itself."""
    return isinstance(atom, jax_core.Literal)
