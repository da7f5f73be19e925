# SPDX-License-Identifier: Apache-2.0
"""Which program is being made of a loss function, for what asks inside of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from fullshard.core.strategy import Precision
from fullshard.core.text import bytes_text
from fullshard.jax.arrays.mesh import Layout

__all__ = ["MODES", "Findings", "Program", "Site", "current", "tracing"]

MODES = ("weights", "activations", "jit")
"""The things that may travel in a step; the last leaves it to XLA."""


Site = Callable[[Sequence[Any], Sequence[Any], "Program"], list[Any]]
"""A call that the engine carries out in its own way.

It takes operands, what cuts each (None of one that is no weight), and the program; equal ones have
the same ``repr``.
"""


@dataclass
class Findings:
    """The findings made while a loss function is traced.

    ``notes`` are what there is to say about the result, ``held`` why a weight is whole from
    beginning to end, by its name.
    """

    notes: list[str] = field(default_factory=list)
    held: dict[str, str] = field(default_factory=dict)
    has_vocabulary: bool = False

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def hold(self, name: str, size_bytes: int, why: str) -> None:
        """Say that a weight is gathered for longer than its use."""
        self.held.update(dict.fromkeys(name.split(", "), why))  # it may be made of several
        text = bytes_text(size_bytes)
        self.note(f"{name}, {text}, is gathered from beginning to end: {why}")


@dataclass
class Program:
    """The facts known while a loss function is traced.

    ``rows`` is how many examples the loss function sees at once, ``vocabulary`` how embeddings and
    losses over many classes are computed. ``sites`` are marked calls by name.
    """

    layout: Layout
    mode: str
    rows: int
    vocabulary: str
    remat: str
    scan: bool
    precision: Precision
    findings: Findings
    sites: dict[str, tuple[Site, tuple[Any, ...]]] = field(default_factory=dict)

    def mark(
        self, name: str, site: Site, plain: Callable[..., Sequence[Any]], *operands: Any
    ) -> Sequence[Any]:
        """``plain(*operands)`` as one call in the trace, which ``site`` may carry out instead."""
        key = f"{name}_{len(self.sites)}"

        def marked(*operands: Any) -> Sequence[Any]:
            return plain(*operands)

        marked.__name__ = key
        self.sites[key] = site, tuple(map(_kind, operands))
        return jax.jit(marked)(*operands)

    def site(self, name: str, operands: Sequence[Any]) -> Site | None:
        """The site of that name, if operands like these are what was marked."""
        found = self.sites.get(name)
        return found[0] if found and found[1] == tuple(map(_kind, operands)) else None


def _kind(x: Any) -> tuple[Any, Any]:
    return jnp.shape(x), jnp.result_type(x)


_program: ContextVar[Program | None] = ContextVar("fullshard_jax_program", default=None)


def current() -> Program | None:
    """The program that is being traced; None outside of a step of `make_train_step`."""
    return _program.get()


@contextmanager
def tracing(program: Program) -> Iterator[Program]:
    """Make ``program`` the current one."""
    token = _program.set(program)
    try:
        yield program
    finally:
        _program.reset(token)
