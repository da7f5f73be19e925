# SPDX-License-Identifier: Apache-2.0
"""Weights that a loss uses outside of `gathered`, `scan_layers`, `embed` and `cross_entropy`."""

from collections.abc import Sequence
from typing import Any

from fullshard.jax.compute.gathered import jaxprs_in

__all__ = ["AROUND_LOOP", "used_outside"]

AROUND_LOOP = "gathered(layer)(weights, x) around the loop"
"""The call for weights that every turn of a loop uses: XLA sums their gradients in each."""

_CALLS = {
    "gather": "embed(table, tokens)",
    "conv_general_dilated": "gathered(layer)(weights, x)",
    "dot_general": "gathered(layer)(weights, x), or of a head cross_entropy(hidden, head, targets)",
    "ragged_dot_general": "gathered(layer)(weights, x)",
    "while": AROUND_LOOP,
}


def used_outside(jaxpr: Any, names: Sequence[str]) -> dict[str, str]:
    """Name the arrays of ``names``, the first operands, that XLA gathers, with the call to write.

    A weight stays itself through operations on it alone, as casts, slices and transposes.
    """
    outside: dict[str, str] = {}
    _walk(jaxpr, dict(zip(jaxpr.invars, names, strict=False)), outside)
    return outside


def _walk(jaxpr: Any, named: dict[Any, str], outside: dict[str, str]) -> list[str | None]:
    """Go through a jaxpr whose variables ``named`` are weights; the names of its results."""

    def name(atom: Any) -> str | None:
        return None if hasattr(atom, "val") else named.get(atom)

    for eqn in jaxpr.eqns:
        weights = [name(atom) for atom in eqn.invars]
        kind = eqn.primitive.name
        if not any(weights) or kind == "shard_map":
            continue
        results: Sequence[str | None] = []
        if kind in _CALLS:
            outside.update((each, _CALLS[kind]) for each in weights if each)
        elif inner := jaxprs_in(eqn):
            for one in inner:  # what chooses a branch stands before its operands
                theirs = weights[max(0, len(weights) - len(one.invars)) :]
                pairs = zip(one.invars, theirs, strict=False)
                results = _walk(one, {a: b for a, b in pairs if b}, outside)
            constants = weights[: eqn.params["num_consts"]] if kind == "scan" else ()
            outside.update((each, AROUND_LOOP) for each in constants if each in outside)
        elif not any(x.aval.shape for x in eqn.invars if not name(x)):
            results = [next(filter(None, weights))] * len(eqn.outvars)
        named.update((x, n) for x, n in zip(eqn.outvars, results, strict=False) if n)
    return [name(atom) for atom in jaxpr.outvars]
