# SPDX-License-Identifier: Apache-2.0
"""Embeddings and cross-entropy over many classes, whose tables may be the largest arrays there are.

[Note: Tables stay]
A table has V classes of width W, and N devices that share T tokens each have a part of it. Tokens
are gathered, and looked up in W/N columns of all classes, or in all columns of V/N classes; an
all-to-all, or a reduce-scatter, brings rows to where tokens came from. For a loss hidden states are
gathered, each device computes the logits of V/N classes, and devices exchange a maximum and two
sums for each token (arXiv:1909.08053, section 3). A table that rests cut along the other dimension
is turned by an all-to-all, a 1/N of it for each device. Where tokens are many and classes few it is
less to gather the table; what sends fewer elements is done.

[Note: Classes in chunks]
Logits are computed for some classes at a time, forward and again in backward, so that those of all
classes are never there at once, and each chunk's gradient is written where it stays.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fullshard.core.errors import ConfigurationError
from fullshard.jax.layers import Tracing, current, gathered, reduced_gather

_CHUNKS = 16
_CHUNK_BYTES = 1 << 21


def embed(table: Array, tokens: Array) -> Array:
    """Rows of ``table`` (classes, width) by ``tokens`` (batch, ...): (batch, ..., width).

    In a step of `make_train_step` the table is not gathered where that would send more; see
    [Note: Tables stay]. Anywhere else this is ``table[tokens]``.
    """
    now = _acting(tokens)
    cut = None if now is None else now.cut_dim(table)
    if now is None or cut is None:
        return table[tokens]
    axis, count = now.axes.shard, now.axes.shards
    classes, width = table.shape
    in_group = tokens.size // (now.axes.parts // count)
    sent = {"table": classes}  # in rows, each way
    if width % count == 0:
        sent["columns"] = (in_group + (1 - cut) * classes) // count
    if cut == 0:
        sent["classes"] = in_group
    way = min(sent, key=lambda name: sent[name])
    if way == "table":
        return gathered(lambda table, tokens: table[tokens], remat=False)(table, tokens)

    def local(table: Array, tokens: Array) -> Array:
        tokens = jnp.clip(_from_front(tokens, classes), 0, classes - 1)  # as an index is read
        everyones = lax.all_gather(tokens, axis, tiled=True)
        if way == "columns":
            rows = table[everyones]
            return lax.all_to_all(rows, axis, 0, rows.ndim - 1, tiled=True)
        places = everyones - lax.axis_index(axis) * table.shape[0]
        mine = (places >= 0) & (places < table.shape[0])
        rows = jnp.where(mine[..., None], table[jnp.where(mine, places, 0)], 0)
        return lax.psum_scatter(rows, axis, tiled=True)

    return _mapped(now, local, 1 if way == "columns" else cut, table, tokens)


def cross_entropy(
    hidden: Array, head: Array, targets: Array, *, classes_first: bool = False
) -> Array:
    """The loss of each target, float32 or wider in the shape of ``targets`` (batch, ...).

    ``hidden`` is (batch, ..., width), ``head`` (width, classes), or with ``classes_first``
    (classes, width), as a tied embedding is. The loss is that of ``softmax(hidden @ head)``; means
    and masks are the caller's. In a step of `make_train_step` logits of all classes are never there
    at once; see [Note: Tables stay]. It has derivatives of any order there, but none forward: for
    `jax.jvp` through it write the logits out. A target that is no class gives NaN.

    Raises:
        ConfigurationError: if the shapes do not fit each other.
    """
    dim = 0 if classes_first else 1
    width, classes = head.shape[1 - dim], head.shape[dim]
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != width:
        raise ConfigurationError(
            f"cross_entropy of hidden {hidden.shape}, head {head.shape} and targets "
            f"{targets.shape}: expected (..., width), (width, classes) and (...)"
        )
    now = _acting(targets)
    if now is None:
        logits = _widened(hidden @ (head.T if classes_first else head))
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - picked
    axis, count = now.axes.shard, now.axes.shards
    in_group = targets.size // (now.axes.parts // count)
    turned = classes // count if now.cut_dim(head) != dim else 0
    by_classes = in_group + turned < classes
    own, at_once = (-(-classes // count), in_group) if by_classes else (classes, in_group // count)
    chunks = _chunk_count(own, at_once)
    padded = -(-own // chunks) * chunks * (count if by_classes else 1)

    def local(head: Array, hidden: Array, targets: Array) -> Array:
        states, labels = hidden.reshape(-1, width), targets.reshape(-1)
        if not by_classes:
            each = _Chunks(dim, classes, chunks, None)
            return _losses(states, _padded(head, dim, padded), labels, each).reshape(targets.shape)
        states = reduced_gather(states, axis, 0, now.reduce)
        labels = lax.all_gather(labels, axis, tiled=True)
        losses = _losses(states, head, labels, _Chunks(dim, classes, chunks, axis))
        mine = lax.axis_index(axis) * targets.size
        return lax.dynamic_slice_in_dim(losses, mine, targets.size).reshape(targets.shape)

    targets = _from_front(targets, classes)
    if by_classes:
        losses = _mapped(now, local, dim, _padded(head, dim, padded), hidden, targets)
    else:
        losses = gathered(local, remat=False)(head, hidden, targets)
    return jnp.where((targets >= 0) & (targets < classes), losses, jnp.nan)


def _acting(tokens: Array) -> Tracing | None:
    """The step that is being traced, if its devices share these tokens."""
    now = current()
    if now is None or now.axes.parts == 1 or not now.axes.only_batch:
        return None
    return now if tokens.ndim and tokens.shape[0] % now.axes.parts == 0 else None


def _from_front(places: Array, size: int) -> Array:
    """Indices as NumPy reads them: negative ones count from the end."""
    places = places.astype(jnp.promote_types(places.dtype, jnp.int32))
    return jnp.where(places < 0, places + size, places)


def _mapped(now: Tracing, local: Any, cut: int, table: Array, *args: Array) -> Array:
    """``local`` of a table that is cut along that dimension, and of examples, giving examples."""
    examples = now.axes.examples()
    specs = (now.axes.weight(cut), *(examples for _ in args))
    return now.axes.shard_map(local, in_specs=specs, out_specs=examples)(table, *args)


def _chunk_count(classes: int, tokens: int) -> int:
    """Chunks of classes whose logits are of some MiB; a divisor, unless that makes few of them."""
    wanted = max(1, min(_CHUNKS, classes, classes * tokens * 4 // _CHUNK_BYTES))
    exact = max(n for n in range(1, wanted + 1) if classes % n == 0)
    return exact if 2 * exact >= wanted else wanted


def _padded(head: Array, dim: int, size: int) -> Array:
    widths = [(0, size - n if at == dim else 0) for at, n in enumerate(head.shape)]
    return jnp.pad(head, widths) if size != head.shape[dim] else head


@dataclass(frozen=True)
class _Chunks:
    """Classes in ``count`` chunks.

    ``dim`` of a head has this device's classes, of ``classes`` in all; with ``axis`` None it has
    all of them.
    """

    dim: int
    classes: int
    count: int
    axis: str | None

    def logits(self, kept: Sequence[Array], number: int) -> tuple[Array, Array, Array]:
        """Logits (tokens, classes), where targets are among them, and the chunk of the head."""
        hidden, head, targets = kept[:3]
        own = head.shape[self.dim]
        size = own // self.count
        piece = lax.dynamic_slice_in_dim(head, number * size, size, self.dim)
        logits = _widened(_dot(hidden, piece, 1 - self.dim))
        first = 0 if self.axis is None else lax.axis_index(self.axis) * own
        there = first + number * size + jnp.arange(size)
        logits = jnp.where(there < self.classes, logits, -1e30)  # the rest is padding
        return logits, there == targets[:, None], piece


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _losses(hidden: Array, head: Array, targets: Array, chunks: _Chunks) -> Array:
    """Losses (tokens,) from hidden states (tokens, width); inside of `jax.shard_map`."""
    return _forward(hidden, head, targets, chunks)[0]


def _forward(
    hidden: Array, head: Array, targets: Array, chunks: _Chunks
) -> tuple[Array, tuple[Array, ...]]:
    def step(number: int, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, picked = sums
        logits, hit, _ = chunks.logits((hidden, head, targets), number)
        now = jnp.maximum(highest, logits.max(-1))
        total = total * jnp.exp(highest - now) + jnp.exp(logits - now[:, None]).sum(-1)
        return now, total, picked + jnp.where(hit, logits, 0).sum(-1)

    zeros = jnp.zeros(targets.shape[0], jnp.promote_types(hidden.dtype, jnp.float32))
    highest, total, picked = lax.fori_loop(0, chunks.count, step, (zeros - 1e30, zeros, zeros))
    if chunks.axis is not None:
        most = lax.pmax(highest, chunks.axis)
        total, picked = lax.psum(jnp.stack([total * jnp.exp(highest - most), picked]), chunks.axis)
        highest = most
    normaliser = jnp.log(total) + highest
    return normaliser - picked, (hidden, head, targets, normaliser)


def _backward(chunks: _Chunks, kept: tuple[Array, ...], grad: Array) -> tuple[Array, Array, None]:
    hidden, head, _, normaliser = kept
    grad = grad if chunks.axis is None else lax.psum(grad, chunks.axis)
    dim = chunks.dim

    def step(number: int, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        of_hidden, of_head = grads
        logits, hit, piece = chunks.logits(kept, number)
        slopes = (jnp.exp(logits - normaliser[:, None]) - hit) * grad[:, None]
        slopes = slopes.astype(hidden.dtype)
        of_hidden += _widened(_dot(slopes, piece, dim))
        a, b = (slopes, hidden) if dim == 0 else (hidden, slopes)
        of_piece = lax.dot_general(a, b, (((0,), (0,)), ((), ())))
        start = number * piece.shape[dim]
        return of_hidden, lax.dynamic_update_slice_in_dim(of_head, of_piece, start, dim)

    zeros = _widened(jnp.zeros_like(hidden)), jnp.zeros_like(head)
    of_hidden, of_head = lax.fori_loop(0, chunks.count, step, zeros)
    return of_hidden.astype(hidden.dtype), of_head, None


_losses.defvjp(_forward, _backward)


def _widened(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _dot(x: Array, piece: Array, dim: int) -> Array:
    """The product of ``x`` (tokens, n) with the dimension of ``piece`` that has n."""
    return lax.dot_general(x, piece, (((1,), (dim,)), ((), ())))
