# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded arrays do what they do over whole ones, and their state rests sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import create_mesh, make_train_step


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: "matrix" if x.ndim == 2 and path[1].idx == 0 else "other", params
    )


OPTIMIZERS = {
    "lamb, low precision": lambda: optax.chain(
        optax.scale_by_adam(mu_dtype=jnp.bfloat16), optax.scale_by_trust_ratio(), optax.scale(-0.01)
    ),
    "by label": lambda: optax.partition(
        {"matrix": optax.adam(1e-2), "other": optax.sgd(1e-1, momentum=0.5)}, labels
    ),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: contrib.muon(1e-2, ns_steps=2),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "lion": lambda: optax.lion(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "schedule-free": lambda: contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: contrib.prodigy(),
    "sam": lambda: contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2), sync_period=2),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "sophia-like clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.rmsprop(1e-3)),
}


def tree():
    return {"layers": models.make_tree()["layers"]}


def loss(params, batch):
    return models.tree_error({**params, "scale": 1.0}, batch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_itself(name):
    batches = list(models.vector_batches(2, 16, 12))
    step = make_train_step(
        tree(), OPTIMIZERS[name](), loss, create_mesh(fsdp=2), at_most_unsharded=1.0
    )
    losses, params, state = models.train_sharded(step, batches)
    expected_losses, expected = models.train_alone(tree(), OPTIMIZERS[name](), loss, batches)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for key, x in params.items():
        np.testing.assert_allclose(x, expected[key], atol=2e-4 if "low" in name else 5e-6)
    for path, leaf in jax.tree.leaves_with_path(state):
        if any(size % 2 == 0 for size in leaf.shape):
            assert leaf.addressable_shards[0].data.size * 2 == leaf.size, path


def test_optimizers_that_ask_for_the_loss_elsewhere():
    batches = list(models.vector_batches(2, 16, 12))
    opaque = contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2), opaque_mode=True)
    for tx in (opaque, optax.lbfgs()):
        step = make_train_step(tree(), tx, loss, create_mesh(fsdp=2))
        losses, _, _ = models.train_sharded(step, batches[:1] * 2)
        params, state, expected = tree(), tx.init(tree()), []
        for batch in batches[:1] * 2:
            value_fn = lambda p, batch=batch: loss(p, batch)  # noqa: E731
            value, grads = jax.value_and_grad(value_fn)(params)
            more = {"value": value, "grad": grads, "value_fn": value_fn}
            if tx is opaque:
                more = {"grad_fn": lambda p, _, f=value_fn: jax.grad(f)(p)}
            updates, state = tx.update(grads, state, params, **more)
            params = optax.apply_updates(params, updates)
            expected.append(float(value))
        np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_what_is_no_optimizer():
    optimizer = nnx.Optimizer(models.Attention(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ConfigurationError, match=r"got Optimizer; of an nnx.Optimizer"):
        make_train_step(tree(), optimizer, loss, create_mesh(fsdp=1))
