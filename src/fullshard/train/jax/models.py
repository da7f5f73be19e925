# SPDX-License-Identifier: Apache-2.0
"""The models of `fullshard train` in Flax NNX, with the arithmetic of `train/torch/models.py`.

Plain NNX, but for one word: `scan_layers` goes through layers whose weights travel together. They
have the names of the torch models, so that `fullshard.jax.torch_names` tells which array is which.
From equal weights the GPTs of both engines give equal losses; `NnxDigitNet` does so without dropout
only, since JAX and torch draw other random numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fullshard.core.presets import Transformer
from fullshard.jax import scan_layers

_STD = 0.02

Angles = tuple[Array, Array]


def rotary(positions: int, head_width: int, theta: float, first: Array | int = 0) -> Angles:
    """Cosine and sine, float32 (positions, 1, head_width / 2), of rotary positions from ``first``
    on (arXiv:2104.09864).
    """
    frequency = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    place = first + jnp.arange(positions, dtype=jnp.float32)
    angle = jnp.outer(place, frequency)[:, None]
    return jnp.cos(angle), jnp.sin(angle)


def _turn(heads: Array, angles: Angles) -> Array:
    """Turn ``heads`` (batch, positions, heads, head_width); same shape and dtype."""
    cos, sin = angles
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(heads.dtype)


def _linear(inputs: int, outputs: int, std: float, dtype: Any, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.normal(std)
    return nnx.Linear(
        inputs, outputs, use_bias=False, kernel_init=init, param_dtype=dtype, rngs=rngs
    )


def _norm(shape: Transformer, dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(shape.width, epsilon=1e-5, param_dtype=dtype, rngs=rngs)


class NnxAttention(nnx.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, shape: Transformer, dtype: Any, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        width, kv_width = shape.width, shape.kv_heads * shape.head_width
        self.query = _linear(width, width, _STD, dtype, rngs)
        self.key = _linear(width, kv_width, _STD, dtype, rngs)
        self.value = _linear(width, kv_width, _STD, dtype, rngs)
        self.out = _linear(width, width, _residual_std(shape), dtype, rngs)

    def __call__(self, x: Array, angles: Angles) -> Array:
        """Mix positions of ``x`` (batch, positions, width), each seeing itself and those before."""
        query, key, value = self._parts(x, angles)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.reshape(x.shape))

    def decode(
        self, x: Array, angles: Angles, cache: tuple[Array, Array], position: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Mix one new position of ``x`` (batch, 1, width) with those in ``cache``."""
        query, *new = self._parts(x, angles)
        room = cache[0].shape[1]
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(held, each, position % room, 1)
            for held, each in zip(cache, new, strict=True)
        )
        seen = (jnp.arange(room) <= position)[None, None, None]
        mixed = jax.nn.dot_product_attention(query, keys, values, mask=seen)
        return self.out(mixed.reshape(x.shape)), (keys, values)

    def _parts(self, x: Array, angles: Angles) -> tuple[Array, Array, Array]:
        query = _turn(_split(self.query(x), self.heads), angles)
        key = _turn(_split(self.key(x), self.kv_heads), angles)
        return query, key, _split(self.value(x), self.kv_heads)


def _split(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _residual_std(shape: Transformer) -> float:
    # Matrices that write to the residual stream start smaller, so that its variance does not grow
    # with depth (GPT-2, section 2.3).
    return _STD / math.sqrt(2 * shape.layers)


class NnxFeedForward(nnx.Module):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: Transformer, dtype: Any, rngs: nnx.Rngs) -> None:
        self.gate = _linear(shape.width, shape.hidden, _STD, dtype, rngs)
        self.up = _linear(shape.width, shape.hidden, _STD, dtype, rngs)
        self.down = _linear(shape.hidden, shape.width, _residual_std(shape), dtype, rngs)

    def __call__(self, x: Array) -> Array:
        """Transform each position of ``x`` (batch, positions, width) on its own."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class NnxBlock(nnx.Module):
    """One layer: attention, then feed-forward, each normed before and added to its input."""

    def __init__(self, shape: Transformer, dtype: Any, rngs: nnx.Rngs) -> None:
        self.attention_norm = _norm(shape, dtype, rngs)
        self.attention = NnxAttention(shape, dtype, rngs)
        self.feed_forward_norm = _norm(shape, dtype, rngs)
        self.feed_forward = NnxFeedForward(shape, dtype, rngs)

    def __call__(self, x: Array, angles: Angles) -> Array:
        """Refine ``x`` (batch, positions, width)."""
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.feed_forward_norm(x))

    def decode(
        self, x: Array, angles: Angles, cache: tuple[Array, Array], position: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        """Refine one new position, with the keys and values of those before it."""
        mixed, cache = self.attention.decode(self.attention_norm(x), angles, cache, position)
        x = x + mixed
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class NnxGPT(nnx.Module):
    """A decoder-only language model of a preset's shape; ``dtype`` is that of its parameters."""

    def __init__(self, shape: Transformer, dtype: Any = jnp.float32, *, rngs: nnx.Rngs) -> None:
        self.shape = shape
        init = nnx.initializers.normal(_STD)
        self.embedding = nnx.Embed(
            shape.vocab, shape.width, embedding_init=init, param_dtype=dtype, rngs=rngs
        )
        self.blocks = nnx.List([NnxBlock(shape, dtype, rngs) for _ in range(shape.layers)])
        self.norm = _norm(shape, dtype, rngs)
        self.output = None if shape.tied else _linear(shape.width, shape.vocab, _STD, dtype, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return logits (batch, positions, vocab) of the token after ``tokens``."""
        angles = rotary(tokens.shape[-1], self.shape.head_width, self.shape.rope_theta)
        x = self.embedding(tokens)
        return self._logits(scan_layers(self.blocks)(x, angles))

    def _logits(self, x: Array) -> Array:
        x = self.norm(x)
        return self.embedding.attend(x) if self.output is None else self.output(x)

    def cache(self, rows: int, length: int) -> list[tuple[Array, Array]]:
        """Room for the keys and values of ``rows`` texts, of ``length`` positions or a context."""
        shape = self.shape
        room = (rows, min(length, shape.context), shape.kv_heads, shape.head_width)
        dtype = self.embedding.embedding.dtype
        return [(jnp.zeros(room, dtype), jnp.zeros(room, dtype)) for _ in self.blocks]

    def decode(self, tokens: Array, cache: Any, position: Array) -> tuple[Array, Any]:
        """Return logits (rows, vocab) of the token after ``tokens`` (rows,) at ``position``.

        ``cache`` comes back with their keys and values in it; beyond a context the oldest go.
        """
        shape = self.shape
        angles = rotary(1, shape.head_width, shape.rope_theta, position)
        x = self.embedding(tokens[:, None])
        after = []
        for block, held in zip(self.blocks, cache, strict=True):
            x, held = block.decode(x, angles, held, position)
            after.append(held)
        return self._logits(x)[:, 0], after


class NnxDigitNet(nnx.Module):
    """Two convolutions and two linear layers for 28 x 28 digits; 1,199,882 parameters."""

    def __init__(self, dtype: Any = jnp.float32, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", **_uniform(9, dtype), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", **_uniform(9 * 32, dtype), rngs=rngs)
        self.dropout1 = nnx.Dropout(0.25, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.5, rngs=rngs)
        self.fc1 = nnx.Linear(64 * 12 * 12, 128, **_uniform(64 * 12 * 12, dtype), rngs=rngs)
        self.fc2 = nnx.Linear(128, 10, **_uniform(128, dtype), rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """Log-probabilities (batch, 10) of ``images`` (batch, 1, 28, 28)."""
        x = jnp.moveaxis(images, 1, -1)
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(x))))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = self.dropout1(x)
        # Channels first, as the rows of torch's fc1 expect them.
        x = jnp.moveaxis(x, -1, 1).reshape(len(x), -1)
        x = self.dropout2(nnx.relu(self.fc1(x)))
        return nnx.log_softmax(self.fc2(x), axis=1)


def _uniform(inputs: int, dtype: Any) -> dict[str, Any]:
    """Values uniform up to 1 / sqrt(inputs), biases too: what torch's layers begin with."""

    def init(key: Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
        bound = 1 / math.sqrt(inputs)
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return {"kernel_init": init, "bias_init": init, "param_dtype": dtype}
