# SPDX-License-Identifier: Apache-2.0
"""Sharded training is training: the same losses and parameters as on one device."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import Rule, create_mesh, make_train_step, threshold

ROWS = 840  # divided by all numbers of devices below


def adam():
    # A large epsilon: else parameters whose true gradient is zero move by normalised noise.
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim >= 2)
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-3, mask=matrices))


def conv_net():
    model = models.ConvNet(nnx.Rngs(0))
    model.eval()  # else statistics are those of each device's part
    return model


CASES = {
    "gpt": (
        lambda: models.GPT(nnx.Rngs(0), layers=2),
        models.cross_entropy,
        lambda: models.token_batches(5, ROWS),
    ),
    "attention": (
        lambda: models.Attention(nnx.Rngs(0)),
        models.squared_error,
        lambda: models.vector_batches(5, ROWS, 2, 12),
    ),
    "tied": (
        lambda: models.GPT(nnx.Rngs(0), layers=2, tied=True),
        models.cross_entropy,
        lambda: models.token_batches(5, ROWS),
    ),
    "conv": (
        conv_net,
        models.cross_entropy,
        lambda: models.image_batches(5, ROWS),
    ),
    "tree": (models.make_tree, models.tree_error, lambda: models.vector_batches(5, ROWS, 12)),
}


@functools.cache
def made(case):
    return CASES[case][0]()


@functools.cache
def alone(case):
    make, loss_fn, batches = CASES[case]
    return models.train_alone(make(), adam(), loss_fn, batches())


def assert_close(found, expected, tolerance=1e-5):
    assert found.keys() <= expected.keys()
    for name, x in found.items():
        size = max(np.abs(expected[name]).max(), 1e-2)  # some have no gradient but noise
        np.testing.assert_allclose(x, expected[name], atol=tolerance * size, err_msg=name)


def assert_trains_alike(case, devices, **options):
    _, loss_fn, batches = CASES[case]
    options = {"mesh": create_mesh(fsdp=devices), **options}
    step = make_train_step(made(case), adam(), loss_fn, **options)
    losses, params, _ = models.train_sharded(step, batches())
    expected_losses, expected = alone(case)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_close(params, expected)
    assert step.compilations == 1
    assert losses[-1] < losses[0]
    return step


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 7, 8])
def test_gpt(devices):
    step = assert_trains_alike("gpt", devices)
    assert step.coverage == 1
    assert step.notes == ["blocks.0 to blocks.1 are 2 equal layers"]


@pytest.mark.parametrize("devices", [2, 3, 5, 6, 7, 8])
def test_convolutions(devices):
    assert assert_trains_alike("conv", devices).coverage == 1


@pytest.mark.parametrize("devices", [5, 8])
def test_attention_that_nobody_adapted(devices):
    assert assert_trains_alike("attention", devices).coverage == 1


@pytest.mark.parametrize("devices", [3, 8])
def test_tree(devices):
    assert assert_trains_alike("tree", devices).coverage == 1


def test_a_weight_used_twice():
    step = assert_trains_alike("tied", 8, remat="matmuls", scan=False)
    assert "embed.embedding" in {spec.path for spec in step.specs}


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("gpt", {"accumulate": 5, "gather": "once"}),
        ("conv", {"remat": "matmuls"}),
        ("tree", {"remat": "none", "accumulate": 3}),
        ("tree", {"mode": "compiler", "accumulate": 3}),
        ("tree", {"rule": threshold(80)}),
    ],
    ids=str,
)
def test_ways_to_run(case, options):
    assert_trains_alike(case, 7, **options)


def test_hybrid_mesh():
    assert_trains_alike("gpt", None, mesh=create_mesh(data=2, fsdp=3))


def test_tensor_axis():
    rule = Rule(tensor={r"up\.kernel": 1, r"down\.kernel": 0, "^out.kernel": 1})
    with pytest.raises(ConfigurationError, match="tensor=2 does not divide dimension 1 of 'out"):
        assert_trains_alike("gpt", None, mesh=create_mesh(fsdp=4, tensor=2), rule=rule)
    rule = Rule(tensor={r"up\.kernel": 1, r"down\.kernel": 0})
    step = assert_trains_alike("gpt", None, mesh=create_mesh(fsdp=4, tensor=2), rule=rule)
    cut = {each.name: each.axes for each in step.placements}
    assert cut["blocks.0-1.up.kernel"] == (None, "fsdp", "tensor")
