# SPDX-License-Identifier: Apache-2.0
"""Programs in float64, where what differs from one device is a fault and no rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support import jax_models as models

from fullshard.jax import create_mesh, cross_entropy, embed, gathered, make_train_step, scan_layers


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def weights(*shapes):
    draw = np.random.default_rng(0)
    return {name: draw.normal(size=shape) / 3 for name, shape in zip("abcd", shapes, strict=False)}


X = np.random.default_rng(1).normal(size=(8, 8))
TOKENS = np.random.default_rng(2).integers(0, 40, (8, 1))


def mlp(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"]


def squares(w, x):
    return (gathered(mlp)(w, x) ** 2).mean()


def curvature(w, x):
    moved = jax.tree.map(jnp.sin, w)
    slope = jax.jvp(jax.grad(squares), (w, x), (moved, jnp.zeros_like(x)))[1]
    return sum((each**2).sum() for each in jax.tree.leaves(slope))


def closing_over(w, x):
    """Layers that close over what the loss computes, and over a weight."""
    mask = jnp.tril(jnp.ones((8, 8))) * (x.max() > -9)

    def layer(own, x):
        return mlp(own, x @ mask) * w["c"].sum()

    return (scan_layers([w, w], layer)(gathered(layer)(w, x)) ** 2).mean()


def mapped_and_branched(w, x):
    both = jax.vmap(lambda x: gathered(mlp)(w, x))(jnp.stack([x, 2 * x]))
    branch = lax.cond(x.sum() > 0, lambda x: gathered(mlp)(w, x), lambda x: 2 * x, x)
    return (both**2).mean() + (lax.fori_loop(0, 2, lambda _, x: gathered(mlp)(w, x), branch)).mean()


def of_odd_shapes(w, x):
    return (gathered(lambda w, x: mlp(w, x @ w["c"]) + w["d"].sum())(w, x) ** 2).mean()


def encoder_and_decoder(w, tokens):
    def attended(w, x, memory):
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ w[0], memory @ w[1]))
        return x + scores @ (memory @ w[2])

    stacks = jnp.split(w["b"].reshape(4, 3, 8, 8), 2)
    memory = scan_layers(stacks[0], lambda w, x: attended(w, x, x))(embed(w["a"], tokens))
    x = scan_layers(stacks[1], attended)(embed(w["a"], tokens % 7), memory)
    losses = cross_entropy(x, w["a"], tokens, classes_first=True)
    return (losses * (tokens > 3)).sum() / (tokens > 3).sum()


def from_the_end(w, tokens):
    """Negative tokens and targets mean what they mean as indices."""
    x = embed(w["a"], tokens - 20)
    return cross_entropy(jnp.tanh(x), w["b"], tokens - 30).mean()


def mapped_tables(w, tokens):
    def one(tokens):
        return cross_entropy(embed(w["a"], tokens), w["b"], tokens // 2).mean()

    return jax.vmap(one, in_axes=1)(jnp.concatenate([tokens, tokens // 3], 1)).mean()


MATRICES = weights((8, 16), (16, 8))


@pytest.mark.parametrize(
    ("loss", "params", "batch"),
    [
        (curvature, MATRICES, X),
        (closing_over, weights((8, 16), (16, 8), (8,)), X),
        (mapped_and_branched, MATRICES, X),
        (of_odd_shapes, weights((5, 7), (7, 5), (8, 5), (0, 8)), X),
        (encoder_and_decoder, weights((40, 8), (12, 8, 8)), np.tile(TOKENS, (1, 5))),
        (from_the_end, weights((400, 7), (7, 400)), TOKENS),
        (mapped_tables, weights((40, 8), (8, 40)), TOKENS),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_programs_give_what_they_give_on_one_device(loss, params, batch):
    step = make_train_step(params, optax.sgd(1.0), loss, create_mesh(fsdp=4), at_most_unsharded=1.0)
    state, found, _ = step(step.init(), batch)
    expected, grads = jax.value_and_grad(loss)(params, batch)
    assert float(found) == pytest.approx(float(expected), rel=1e-10)
    for name, x in params.items():
        np.testing.assert_allclose(x - np.asarray(state.params[name]), grads[name], atol=1e-10)
    assert step.notes == []


class Normed(nnx.Module):
    """A bias before a BatchNorm has a gradient of zero, of which devices make other rounding."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.before = nnx.Linear(8, 16, param_dtype=jnp.float64, rngs=rngs)
        self.norm = nnx.BatchNorm(16, param_dtype=jnp.float64, rngs=rngs)
        self.after = nnx.Linear(16, 8, param_dtype=jnp.float64, rngs=rngs)
        for statistic in (self.norm.mean, self.norm.var):
            statistic.set_value(statistic[...].astype(jnp.float64))

    def __call__(self, x):
        return gathered(self.after)(self.norm(gathered(self.before)(x)))


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2)])
def test_optimizers_that_divide_by_tiny_moments(optimizer):
    """In float32 both part from one device: Adam by its step, where a gradient is but rounding."""
    batches = [{"x": X * n, "y": X[::-1]} for n in (1.0, 0.5, 2.0, 1.5)]
    step = make_train_step(Normed, optimizer, models.squared_error, create_mesh(fsdp=4))
    found, params, state = models.train_sharded(step, batches)
    alone = Normed()
    expected, after = models.train_alone(alone, optimizer, models.squared_error, batches)
    assert found == pytest.approx(expected, rel=1e-10)
    for name, x in params.items():
        np.testing.assert_allclose(x, after[name], atol=1e-9)
    np.testing.assert_allclose(state.other["norm.mean"], alone.norm.mean[...], atol=1e-9)
