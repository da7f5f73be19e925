# SPDX-License-Identifier: Apache-2.0
"""The options of a train step."""

import re
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import AS_IT_RESTS, Precision
from fullshard.jax.arrays.leaves import path_name
from fullshard.jax.arrays.rule import Rule

__all__ = ["MODES", "StepOptions", "is_whole", "read_options"]

MODES = ("weights", "activations", "jit")


class StepOptions(TypedDict, total=False):
    """Keywords of `fullshard.jax.make_train_step`.

    - ``mode``: what travels: "weights" (the default) where `gathered`, `scan_layers`, `embed` and
      `cross_entropy` are called; with "jit" these do nothing and XLA decides, with "activations"
      neither, and examples are on every device of the shard axis, so that weights stay.
    - ``remat``: what backward finds of the forward of a layer that is gathered, unless its call
      says so: "block" (the default) its input, "matmuls" also products, "none" all.
    - ``accumulate``: micro-batches in a step; the loss is the mean of theirs.
    - ``gather``: with several, "each" gathers for every micro-batch anew, "once" for all of them,
      which moves less and holds all parameters and gradients whole.
    - ``precision``: dtype of full parameters, as "bfloat16" or ``jnp.bfloat16`` (where
      `gathered` is called gradients are summed in float32), or a
      `fullshard.core.strategy.Precision` for both.
    - ``donate``: reuse the memory of the state given; it must not be used again then.
    - ``has_aux``: the loss function returns (loss, tree of arrays).
    - ``wrt``: what is trained: an NNX filter, or for a pytree a predicate on paths.
    - ``rule``: which arrays are sharded (`fullshard.jax.Rule`).
    - ``at_most_unsharded``: the share of bytes that may be on every device; by default 2%, or a
      MiB, or with a rule what that asks for.
    - ``whole``: patterns of paths of the batch: arrays that are the same for all examples, as
      positions.
    - ``check``: before the first step, compare each gathered layer on a whole and on a cut batch,
      and refuse one that mixes examples.
    - ``key``: a random key; the loss function then takes a third argument, one that differs between
      steps.
    - ``shard_axis``, ``batch_axes``: the axes of a mesh whose names do not say what they are for.
    """

    mode: str
    remat: str
    accumulate: int
    gather: str
    precision: Any
    donate: bool
    has_aux: bool
    wrt: Any
    rule: Rule | None
    at_most_unsharded: float | None
    whole: Sequence[str]
    check: bool
    key: Any
    shard_axis: str | None
    batch_axes: Sequence[str] | None


_DEFAULTS: StepOptions = {
    "mode": "weights", "remat": "block", "accumulate": 1, "gather": "each", "precision": None,
    "donate": True, "has_aux": False, "wrt": None, "rule": None, "at_most_unsharded": None,
    "whole": (), "check": False, "key": None, "shard_axis": None, "batch_axes": None,
}  # fmt: skip


def read_options(given: StepOptions) -> StepOptions:
    """Complete ``given``.

    Raises:
        ConfigurationError: for an unknown keyword or value, and what does not go together.
    """
    for name in given:
        if name not in _DEFAULTS:
            raise ConfigurationError(f"unknown option {name!r}; known: {', '.join(_DEFAULTS)}")
    options: StepOptions = {**_DEFAULTS, **given}
    options["precision"] = _precision(options["precision"])
    for name, value, values in (
        ("mode", options["mode"], MODES),
        ("remat", options["remat"], ("block", "matmuls", "none")),
        ("gather", options["gather"], ("each", "once")),
    ):
        if value not in values:
            raise ConfigurationError(f"{name}={value!r} is none of {', '.join(map(repr, values))}")
    accumulate, key = options["accumulate"], options["key"]
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ConfigurationError(
            f"accumulate={accumulate!r}: expected a whole number, at least 1 micro-batch"
        )
    if key is not None and not hasattr(key, "dtype"):
        raise ConfigurationError(f"key={key!r}: expected a random key, as jax.random.key(0)")
    return options


def is_whole(options: StepOptions, path: Any, leaf: Any) -> bool:
    """Tell if an array of a batch, at ``path``, is the same for all examples."""
    name = path_name(path)
    return not np.ndim(leaf) or any(re.search(pattern, name) for pattern in options["whole"])


def _precision(given: Any) -> Precision:
    if given is None:
        return AS_IT_RESTS
    if isinstance(given, Precision):
        return given
    name = given if isinstance(given, str) else np.dtype(given).name
    item_bytes(name)
    return Precision(compute=name, reduce="float32")
