# SPDX-License-Identifier: Apache-2.0
"""Optimizers that look at whole matrices, over arrays as they rest, and the bytes that they add."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support import jax_models as models

from fullshard.jax import communication, create_mesh, make_train_step

DEVICES = 8
WIDTH, HIDDEN = 12, 32


def tree():
    """Two matrices that are cut, and a stack."""
    keys = jax.random.split(jax.random.key(1), 3)
    return {
        "up": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 4,
        "stack": jax.random.normal(keys[2], (3, WIDTH, WIDTH)) / 4,
    }


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
    found = hidden + jnp.einsum("ni,eij->nj", batch["x"], params["stack"])
    return ((found - batch["y"]) ** 2).mean()


def inverse_fourth_root(matrix):
    values, vectors = jnp.linalg.eigh(matrix + 1e-4 * jnp.eye(len(matrix)))
    return (vectors * values.clip(1e-6) ** -0.25) @ vectors.T


def shampoo(rate):
    """Shampoo as its paper has it: products of gradients along either side of a matrix."""

    def sides(x):
        return [jnp.zeros((size, size)) for size in x.shape if x.ndim == 2]

    def init(params):
        return {name: sides(x) for name, x in params.items()}

    def update(grads, state, params=None):
        products = {name: [g @ g.T, g.T @ g] if state[name] else [] for name, g in grads.items()}
        state = jax.tree.map(jnp.add, state, products)
        updates = {}
        for name, grad in grads.items():
            left, right = map(inverse_fourth_root, state[name]) if state[name] else (None, None)
            updates[name] = -rate * (grad if left is None else left @ grad @ right)
        return updates, state

    return optax.GradientTransformation(init, update)


GRAMS = 4 * 5 * 2 * WIDTH**2  # bytes of what five iterations sum, of two matrices
OPTIMIZERS = {  # and the most bytes that each adds to those of a gradient step, but some numbers
    "muon": (lambda: contrib.muon(1e-2), GRAMS),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4), 4 * 4 * WIDTH),
    "lamb": (lambda: optax.lamb(1e-2), 0),
    "lars": (lambda: optax.lars(1e-2), 0),
    # Products along either side of two matrices, and these matrices twice.
    "shampoo": (lambda: shampoo(1e-2), 4 * 2 * (WIDTH**2 + HIDDEN**2 + 2 * WIDTH * HIDDEN)),
}
SOME_NUMBERS = 128


@pytest.fixture(scope="module")
def sent_by_sgd():
    step = make_train_step(tree(), optax.sgd(1e-2), loss, create_mesh(fsdp=DEVICES))
    return communication(step, next(models.vector_batches(1, 24, WIDTH))).sent_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_that_of_one_device_and_adds_so_many_bytes(name, sent_by_sgd):
    make, most = OPTIMIZERS[name]
    batches = list(models.vector_batches(3, 24, WIDTH))
    step = make_train_step(tree(), make(), loss, create_mesh(fsdp=DEVICES))
    losses, params, _ = models.train_sharded(step, batches)
    expected_losses, expected = models.train_alone(tree(), make(), loss, batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for key, value in params.items():
        np.testing.assert_allclose(value, expected[key], atol=5e-6)
    added = communication(step, batches[0]).sent_bytes - sent_by_sgd
    # A sum over devices sends each number twice, but what stays.
    assert added <= 2 * (DEVICES - 1) / DEVICES * most + SOME_NUMBERS
