# SPDX-License-Identifier: Apache-2.0
"""Embeddings and cross-entropy over many classes, whose tables may be the largest arrays there are.

[Note: Cut along the classes]
A table of V classes is cut so that each of N devices has V/N of them. To look rows up, tokens are
gathered, each device gives the rows that it has, and a reduce-scatter brings the sums to where
tokens came from. For a loss, hidden states are gathered, each device computes the logits of its
classes, and devices exchange a maximum and two sums for each token (arXiv:1909.08053, section 3).
Tables never travel; their gradients are complete where they rest.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.compute.at_use import gather
from fullshard.jax.compute.context import Program, current
from fullshard.jax.compute.gathered import padded

__all__ = ["cross_entropy", "embed"]

_CHUNKS = 8


def embed(table: Array, tokens: Array) -> Array:
    """Rows of ``table`` (classes, width) by ``tokens`` (batch, ...): (batch, ..., width).

    In a step of `make_train_step` with ``vocabulary="cut"`` the table stays where it rests; see
    [Note: Cut along the classes]. Anywhere else this is ``table[tokens]``.
    """
    program = _asked()
    if program is None or program.vocabulary != "cut" or not _can_cut(program, tokens):
        return table[tokens]
    if program.mode != "weights":
        return _constrained(program, table, 0)[tokens]
    (rows,) = program.mark("embed", _embed, lambda t, i: [t[i]], table, tokens)
    return rows


def cross_entropy(
    hidden: Array, head: Array, targets: Array, *, classes_first: bool = False
) -> Array:
    """The loss of each target, float32 in the shape of ``targets`` (batch, ...).

    ``hidden`` is (batch, ..., width), ``head`` (width, classes), or with ``classes_first``
    (classes, width), as a tied embedding is. The loss is that of ``softmax(hidden @ head)``; means
    and masks are the caller's. In a step of `make_train_step` the option ``vocabulary`` says how it
    is computed, with the same result.

    Raises:
        ConfigurationError: if the shapes do not fit each other.
    """
    width = head.shape[1] if classes_first else head.shape[0]
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != width:
        raise ConfigurationError(
            f"cross_entropy of hidden {hidden.shape}, head {head.shape} and targets "
            f"{targets.shape}: expected (..., width), (width, classes) and (...)"
        )
    program = _asked()
    way = program.vocabulary if program is not None else "whole"
    if program is not None and way == "cut" and _can_cut(program, targets):
        if program.mode == "weights":
            site = partial(_cross_entropy, classes_first)
            (losses,) = program.mark(
                "cross_entropy",
                site,
                lambda h, w, t: [_plain(h, w, t, classes_first)],
                *(hidden, head, targets),
            )
            return losses
        head = _constrained(program, head, 0 if classes_first else 1)
    if way == "chunks" and targets.ndim > 1:
        return _chunked(hidden, head, targets, classes_first)
    return _plain(hidden, head, targets, classes_first)


def _asked() -> Program | None:
    """The program that is being traced, which learns that it has a vocabulary."""
    program = current()
    if program is not None:
        program.findings.has_vocabulary = True
    return program


def _plain(hidden: Array, head: Array, targets: Array, classes_first: bool) -> Array:
    logits = (hidden @ (head.T if classes_first else head)).astype(jnp.float32)
    # A sum over a mask and no lookup, so that logits may be cut along the classes.
    classes = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.where(classes == targets[..., None], logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def _chunked(hidden: Array, head: Array, targets: Array, classes_first: bool) -> Array:
    """Position by position, so that logits of all of them are never there at once."""
    positions = targets.shape[1]
    program = current()
    if program is not None and program.mode == "weights":
        (head,) = program.mark("head", _once, lambda x: [x], head)
    count = max(n for n in range(1, _CHUNKS + 1) if positions % n == 0)

    def chunks(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], count, -1, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        return None, _plain(chunk[0], head, chunk[1], classes_first)

    _, losses = lax.scan(one, None, (chunks(hidden), chunks(targets)))
    return jnp.moveaxis(losses, 0, 1).reshape(targets.shape)


def _can_cut(program: Program, tokens: Array) -> bool:
    layout = program.layout
    return layout.only_batch and tokens.ndim > 0 and tokens.shape[0] % layout.parts == 0


def _constrained(program: Program, table: Array, dim: int) -> Array:
    layout = program.layout
    axes = tuple(layout.shard if at == dim else None for at in range(table.ndim))
    return lax.with_sharding_constraint(table, layout.sharding(*axes))


def _embed(operands: Sequence[Any], _: Sequence[Any], program: Program) -> list[Any]:
    """A lookup in a table that is cut along its classes."""
    layout = program.layout

    def local(table: Array, tokens: Array) -> Array:
        tokens = lax.all_gather(tokens, layout.shard, tiled=True)
        places, mine = _places(tokens, table.shape[0], layout)
        rows = jnp.where(mine[..., None], table[places], 0)
        return lax.psum_scatter(rows, layout.shard, tiled=True)

    table = padded(operands[0], 0, layout.shards)
    examples = PartitionSpec(layout.examples)
    mapped = jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(PartitionSpec(layout.weights), examples),
        out_specs=examples,
        check_vma=False,
    )
    return [mapped(table, operands[1])]


def _once(operands: Sequence[Any], axes: Sequence[Any], program: Program) -> list[Any]:
    """A weight that is gathered before a scan, once for all of its turns."""
    (array,), (cut,) = operands, axes
    whole = array if cut is None else gather(program, array, cut)
    return [whole * jnp.ones((), whole.dtype)]  # what is computed stays for backward


def _cross_entropy(
    classes_first: bool, operands: Sequence[Any], _: Sequence[Any], program: Program
) -> list[Any]:
    """Losses from a head that is cut along its classes."""
    layout = program.layout
    hidden, head, targets = operands
    dim = 0 if classes_first else 1
    examples = PartitionSpec(layout.examples)
    mapped = jax.shard_map(
        _losses(layout, head.shape[dim], classes_first),
        mesh=layout.mesh,
        in_specs=(examples, PartitionSpec(*(None,) * dim, layout.weights), examples),
        out_specs=examples,
        check_vma=False,
    )
    return [mapped(hidden, padded(head, dim, layout.shards), targets)]


def _losses(layout: Layout, classes: int, classes_first: bool) -> Any:
    """Losses of this device's examples, from its part of the head; inside `jax.shard_map`."""
    axis = layout.shard

    def everyones(*arrays: Array) -> list[Array]:
        return [lax.all_gather(x, axis, tiled=True) for x in arrays]

    def logits_of(hidden: Array, head: Array) -> Array:
        logits = (hidden @ (head.T if classes_first else head)).astype(jnp.float32)
        first = lax.axis_index(axis) * logits.shape[-1]
        there = first + jnp.arange(logits.shape[-1]) < classes  # the rest is padding
        return jnp.where(there, logits, -jnp.inf)

    def forward(hidden: Array, head: Array, targets: Array) -> tuple[Array, Any]:
        every, their = everyones(hidden, targets)
        logits = logits_of(every, head)
        highest = lax.pmax(logits.max(-1), axis)
        places, mine = _places(their, logits.shape[-1], layout)
        picked = jnp.where(mine, jnp.take_along_axis(logits, places[..., None], -1)[..., 0], 0)
        sums = jnp.stack([jnp.exp(logits - highest[..., None]).sum(-1), picked], axis=1)
        sums = lax.psum_scatter(sums, axis, tiled=True)
        rows = targets.shape[0]
        highest = lax.dynamic_slice_in_dim(highest, lax.axis_index(axis) * rows, rows)
        normaliser = jnp.log(sums[:, 0]) + highest
        return normaliser - sums[:, 1], (hidden, head, targets, normaliser)

    def backward(kept: Any, gradient: Array) -> tuple[Array, Array, None]:
        hidden, head, targets, normaliser = kept
        every, their, normaliser, gradient = everyones(hidden, targets, normaliser, gradient)
        logits = logits_of(every, head)
        places, mine = _places(their, logits.shape[-1], layout)
        hit = (jnp.arange(logits.shape[-1]) == places[..., None]) & mine[..., None]
        chances = jnp.exp(logits - normaliser[..., None])
        slopes = ((chances - hit) * gradient[..., None]).astype(hidden.dtype)
        of_hidden = slopes @ (head if classes_first else head.T)
        of_hidden = lax.psum_scatter(of_hidden, axis, tiled=True)
        flat = every.reshape(-1, every.shape[-1]), slopes.reshape(-1, slopes.shape[-1])
        of_head = flat[1].T @ flat[0] if classes_first else flat[0].T @ flat[1]
        return of_hidden, of_head.astype(head.dtype), None

    @jax.custom_vjp
    def losses(hidden: Array, head: Array, targets: Array) -> Array:
        return forward(hidden, head, targets)[0]

    losses.defvjp(forward, backward)
    return losses


def _places(tokens: Array, count: int, layout: Layout) -> tuple[Array, Array]:
    """Where in this device's classes each token is, and whether it is there."""
    places = tokens - lax.axis_index(layout.shard) * count
    mine = (places >= 0) & (places < count)
    return jnp.where(mine, places, 0), mine
