# SPDX-License-Identifier: Apache-2.0
"""The options of a train step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import AS_IT_RESTS, Precision
from fullshard.jax.arrays.rule import Rule
from fullshard.jax.compute.context import MODES

__all__ = ["REMAT", "VOCABULARY", "Options", "StepOptions", "read_options"]

REMAT = ("block", "matmuls", "none")
VOCABULARY = ("whole", "cut", "chunks")


class StepOptions(TypedDict, total=False):
    """Keywords of `fullshard.jax.make_train_step`.

    - ``mode``: what travels: "weights" (the default) gathers each where it is used, "activations"
      leaves weights where they rest, "jit" leaves all to XLA, "auto" compiles them all for the
      first batch and takes what needs least.
    - ``vocabulary``: how `fullshard.jax.embed` and `fullshard.jax.cross_entropy` compute where the
      model calls them: with "whole" tables, with each device's part of the classes ("cut"), or with
      whole tables and positions chunk by chunk ("chunks"). Mode "auto" chooses this, too.
    - ``scan``: roll equal layers that follow each other into a scan (the default).
    - ``remat``: what backward finds of a rolled layer's forward: "block" (the default) its input,
      "matmuls" also products with its weights, "none" everything, gathered weights too, which then
      holds for the whole model.
    - ``accumulate``: micro-batches in a step; the loss is the mean of theirs.
    - ``gather``: with several, "each" gathers for every micro-batch anew, "once" for all of them,
      which moves less and holds all parameters and gradients whole.
    - ``precision``: dtype of full parameters, as "bfloat16" or ``jnp.bfloat16`` (in layers that
      `gathered` is asked for gradients are summed in float32), or a
      `fullshard.core.strategy.Precision` for both.
    - ``donate``: reuse the memory of the state given; it must not be used again then.
    - ``has_aux``: the loss function returns (loss, tree of arrays).
    - ``wrt``: what is trained: an NNX filter, or for a pytree a predicate on paths.
    - ``rule``: which arrays are sharded (`fullshard.jax.Rule`).
    - ``at_most_unsharded``: the share of bytes that may be on every device; a rule given counts as
      asking for it.
    - ``key``: a random key; the loss function then takes a third argument, one that differs between
      steps.
    - ``shard_axis``, ``batch_axes``: the axes of a mesh whose names do not say what they are for.
    """

    mode: str
    vocabulary: str
    scan: bool
    remat: str
    accumulate: int
    gather: str
    precision: Any
    donate: bool
    has_aux: bool
    wrt: Any
    rule: Rule | None
    at_most_unsharded: float | None
    key: Any
    shard_axis: str | None
    batch_axes: Sequence[str] | None


@dataclass(frozen=True)
class Options:
    """The same, complete and checked."""

    mode: str = "weights"
    vocabulary: str = "whole"
    scan: bool = True
    remat: str = "block"
    accumulate: int = 1
    gather: str = "each"
    precision: Precision = AS_IT_RESTS
    donate: bool = True
    has_aux: bool = False
    wrt: Any = None
    rule: Rule | None = None
    at_most_unsharded: float = 0.02
    key: Any = None
    shard_axis: str | None = None
    batch_axes: Sequence[str] | None = None

    def given(self) -> StepOptions:
        """These options as keywords."""
        found: Any = {each.name: getattr(self, each.name) for each in fields(self)}
        return found


def read_options(given: StepOptions) -> Options:
    """Complete ``given``.

    Raises:
        ConfigurationError: for an unknown keyword or value, and what does not go together.
    """
    known = StepOptions.__annotations__
    for name in given:
        if name not in known:
            raise ConfigurationError(f"unknown option {name!r}; known: {', '.join(known)}")
    complete: dict[str, Any] = {**given}
    complete["precision"] = _precision(given.get("precision"))
    if given.get("at_most_unsharded") is None:
        complete["at_most_unsharded"] = 0.02 if given.get("rule") is None else 1.0
    options = Options(**complete)
    _one_of("mode", options.mode, (*MODES, "auto"))
    _one_of("vocabulary", options.vocabulary, VOCABULARY)
    _one_of("scan", options.scan, (True, False))
    _one_of("remat", options.remat, REMAT)
    _one_of("gather", options.gather, ("each", "once"))
    if not isinstance(options.accumulate, int) or options.accumulate < 1:
        raise ConfigurationError(
            f"accumulate={options.accumulate!r}: expected a whole number, at least 1 micro-batch"
        )
    if options.key is not None and not hasattr(options.key, "dtype"):
        raise ConfigurationError(
            f"key={options.key!r}: expected a random key, as jax.random.key(0)"
        )
    return options


def _precision(given: Any) -> Precision:
    if given is None:
        return AS_IT_RESTS
    if isinstance(given, Precision):
        return given
    name = given if isinstance(given, str) else np.dtype(given).name
    item_bytes(name)
    return Precision(compute=name, reduce="float32")


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if not any(value is each or value == each for each in known):
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")
