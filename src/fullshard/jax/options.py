# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about a train step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from jax.sharding import Mesh

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import AS_IT_RESTS, Precision
from fullshard.jax.execution import REMAT
from fullshard.jax.placement import Rule

__all__ = ["Options", "StepOptions", "read_options"]

Scan = Literal["auto"] | bool


class StepOptions(TypedDict, total=False):
    """Keywords of `fullshard.jax.make_train_step`.

    - ``remat``: what is kept of a unit's forward for its backward: "block" (the default) its
      inputs, "matmuls" also products with its parameters, "none" everything, with the gathered
      parameters. See `fullshard.jax.execution.REMAT`.
    - ``scan``: "auto" stacks blocks of equal structure and scans over them, True demands that,
      False does not.
    - ``accumulate``: micro-batches in a step, each a part of every device's batch.
    - ``gather``: with several, "each" gathers for every micro-batch anew, "once" for all of them,
      which moves less and holds all parameters and gradients whole.
    - ``precision``: dtype of full parameters, as "bfloat16" (gradients then travel and are summed
      in float32), or a `fullshard.core.strategy.Precision` for both.
    - ``donate``: reuse the memory of the state given; it must not be used again then.
    - ``has_aux``: the loss function returns (loss, tree of arrays to average over devices).
    - ``wrt``: what is trained: an NNX filter, or for a pytree a predicate on paths.
    - ``rule``: which arrays are sharded (`fullshard.jax.Rule`).
    - ``at_most_unsharded``: the share of bytes that may be on every device; a rule given counts as
      asking for it.
    - ``mode``: "shard_map" for explicit collectives, "compiler" to leave them to XLA, "auto".
    - ``key``: a random key; the loss function then takes a third argument, one that differs between
      steps and devices.
    """

    remat: str
    scan: Scan
    accumulate: int
    gather: str
    precision: str | Precision | None
    donate: bool
    has_aux: bool
    wrt: Any
    rule: Rule | None
    at_most_unsharded: float | None
    mode: str
    key: Any


@dataclass(frozen=True)
class Options:
    """The same, complete and checked."""

    remat: str = "block"
    scan: Scan = "auto"
    accumulate: int = 1
    gather: str = "each"
    precision: Precision = AS_IT_RESTS
    donate: bool = True
    has_aux: bool = False
    wrt: Any = None
    rule: Rule | None = None
    at_most_unsharded: float = 0.02
    mode: str = "shard_map"
    key: Any = None


def read_options(given: StepOptions, mesh: Mesh) -> Options:
    """Complete ``given`` for ``mesh``.

    Raises:
        ConfigurationError: for an unknown keyword or value, and what does not go together.
    """
    known = StepOptions.__annotations__
    for name in given:
        if name not in known:
            raise ConfigurationError(f"unknown option {name!r}; known: {', '.join(known)}")
    complete: dict[str, Any] = {**given}
    complete["precision"] = _precision(given.get("precision"))
    tensor = mesh.shape["tensor"]
    if given.get("mode", "auto") == "auto":
        complete["mode"] = "compiler" if tensor > 1 else "shard_map"
    if given.get("at_most_unsharded") is None:
        complete["at_most_unsharded"] = 0.02 if given.get("rule") is None else 1.0
    options = Options(**complete)
    _one_of("remat", options.remat, tuple(REMAT))
    _one_of("scan", options.scan, ("auto", True, False))
    _one_of("gather", options.gather, ("each", "once"))
    _one_of("mode", options.mode, ("shard_map", "compiler"))
    if not isinstance(options.accumulate, int) or options.accumulate < 1:
        raise ConfigurationError(
            f"accumulate={options.accumulate!r}: expected a whole number, at least 1 micro-batch"
        )
    if tensor > 1 and options.mode == "shard_map":
        raise ConfigurationError(
            f"the mesh has tensor={tensor}, which mode='shard_map' does not cut along: leave mode "
            "out, or take a mesh with tensor=1"
        )
    if tensor > 1 and not (options.rule and options.rule.tensor):
        raise ConfigurationError(
            f"the mesh has tensor={tensor}, but no rule says what to cut along it: give "
            "rule=Rule(tensor={pattern: dimension})"
        )
    return options


def _precision(given: str | Precision | None) -> Precision:
    if given is None:
        return AS_IT_RESTS
    if isinstance(given, Precision):
        return given
    item_bytes(given)
    return Precision(compute=given, reduce="float32")


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if not any(value is each or value == each for each in known):
        raise ConfigurationError(f"{name}={value!r} is none of {', '.join(map(repr, known))}")


LossFunction = Callable[..., Any]
