# SPDX-License-Identifier: Apache-2.0
"""Sequences drawn from a model whose weights are sharded."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.placing import to_host
from fullshard.jax.training.state import TrainState
from fullshard.jax.training.step import TrainStep

__all__ = ["generate"]

Decode = Callable[[Any, Array, Any, Array], tuple[Array, Any]]
Cache = Callable[[Any, int, int], Any]


def generate(
    step: TrainStep,
    state: TrainState,
    prompt: Any,
    count: int,
    temperature: float = 1.0,
    seed: int = 0,
    decoder: tuple[Decode, Cache] | None = None,
) -> np.ndarray[Any, Any]:
    """Tokens (rows, count) that the model of ``state`` draws after ``prompt`` (rows, length).

    The model has two methods, or ``decoder`` two functions that take it first.
    ``decode(tokens, cache, position)`` takes one token of each row (rows,) that stands at
    ``position`` and gives logits (rows, classes) for the next, and the cache of keys and values
    with this position in it; ``cache(rows, length)`` makes one with room for ``length`` positions.
    The whole is one program, a scan over positions in which each layer's weights are gathered when
    its turn comes. Rows are cut over the devices if they divide.

    With ``temperature`` 0 the likeliest token is taken. With several processes all of them must
    call, with the same arguments; all get the same tokens.

    Raises:
        ConfigurationError: if the prompt is empty or has another shape, or ``count`` is below 1.
    """
    prompt = np.asarray(prompt, np.int32)
    if prompt.ndim != 2 or not prompt.size or count < 1:
        raise ConfigurationError(
            f"generate wants a prompt of shape (rows, length) and a count of at least 1, got "
            f"{prompt.shape} and {count}"
        )
    arguments = (prompt, np.float32(temperature), np.uint32(seed))
    return to_host(step.apply(state, _Decoding(count, decoder), *arguments))


@dataclass(frozen=True)
class _Decoding:
    """One program that draws; equal for equal functions, so that it is compiled once."""

    count: int
    decoder: tuple[Decode, Cache] | None

    def __call__(self, model: Any, prompt: Array, temperature: Array, seed: Array) -> Array:
        if hasattr(model, "eval"):
            model.eval()
        decode, new_cache = self._functions(model)
        rows, length = prompt.shape
        key = jax.random.key(seed)

        def position(carry: Any, at: Array) -> tuple[Any, Array]:
            token, cache = carry
            logits, cache = decode(token, cache, at)
            logits = logits.astype(jnp.float32)
            noise = jax.random.gumbel(jax.random.fold_in(key, at), logits.shape)
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            drawn = (logits + noise * temperature).argmax(-1).astype(prompt.dtype)
            known = lax.dynamic_index_in_dim(prompt, jnp.minimum(at + 1, length - 1), 1, False)
            token = jnp.where(at + 1 < length, known, drawn)
            return (token, cache), token

        start = prompt[:, 0], new_cache(rows, length + self.count)
        _, tokens = lax.scan(position, start, jnp.arange(length + self.count - 1))
        return tokens[length - 1 :].T

    def _functions(self, model: Any) -> tuple[Callable[..., Any], ...]:
        if self.decoder is not None:
            return tuple(functools.partial(function, model) for function in self.decoder)
        for name in ("cache", "decode"):
            if not hasattr(model, name):
                raise ConfigurationError(
                    "generate wants a model with methods decode and cache, and "
                    f"{type(model).__name__} has no {name}: give decoder=(decode, cache), "
                    "functions that take the model first"
                )
        return model.decode, model.cache
