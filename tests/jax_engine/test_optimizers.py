# SPDX-License-Identifier: Apache-2.0
"""Optimizers over arrays at rest do what they do over arrays in their true shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from fullshard.core.errors import ConfigurationError
from fullshard.jax.gathers import pack, unpack
from fullshard.jax.model import read_model
from fullshard.jax.optimizer import read_optimizer
from fullshard.jax.placement import place


class Layers(nnx.Module):
    def __init__(self, rngs):
        # The layers of the list are stacked; no dimension of the others is divided by 8.
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])
        self.out = nnx.Linear(6, 5, rngs=rngs)
        self.rows = nnx.Linear(16, 2, rngs=rngs)


def by_path(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: "matrix" if x.ndim == 2 and path[0].key != "out" else "other", params
    )


def one_layer_only(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: path[0].key == "layers" and path[1].key == 1, params
    )


IN_LANES = {
    "adamw": lambda: optax.adamw(
        1e-2, mask=lambda tree: jax.tree.map(lambda x: x.ndim >= 2, tree), mu_dtype=jnp.bfloat16
    ),
    "clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(optax.cosine_decay_schedule(0.1, 9), 0.9)
    ),
    "lamb": lambda: optax.lamb(1e-2),
    "by label": lambda: optax.partition(
        {"matrix": optax.adam(1e-2), "other": optax.sgd(1e-1, momentum=0.5)}, labels
    ),
}
WHOLE = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: contrib.muon(1e-2, ns_steps=2),
    "one layer": lambda: optax.masked(optax.sgd(0.5, momentum=0.9), one_layer_only),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}


def plan_for(tx, shards):
    model = read_model(Layers(nnx.Rngs(0)), None, "auto")
    placements = place(model.groups(), {"fsdp": shards})
    return model, read_optimizer(tx, model, placements, shards, jnp.float32)


def at_rest(plan, values):
    packed = {
        name: [pack(each, values[spec.name]) for spec in each.members]
        for name, each in plan.placements.items()
    }
    return {
        name: jnp.stack(members) if plan.placements[name].stacked else members[0]
        for name, members in packed.items()
    }


def as_is(array, placement, member):
    return unpack(placement, array[member] if placement.stacked else array)


@pytest.mark.parametrize("name", [*IN_LANES, *WHOLE])
def test_an_optimizer_is_itself(name):
    tx = (IN_LANES | WHOLE)[name]()
    model, plan = plan_for(tx, 8)
    assert plan.by_lanes == (name in IN_LANES), plan.note
    values = model.initial()
    params = model.tree(values)
    state = tx.init(params)
    resting = at_rest(plan, values)
    kept = plan.init(resting)
    random = np.random.default_rng(0)
    plain, sharded = jax.jit(tx.update), jax.jit(plan.update)
    # Compiled, bf16 momenta are rounded less often than step by step.
    atol = 2e-4 if name == "adamw" else 2e-6
    for _ in range(3):
        grads = {k: jnp.asarray(random.normal(size=x.shape), x.dtype) for k, x in values.items()}
        updates, state = plain(model.tree(grads), state, params)
        params = optax.apply_updates(params, updates)
        resting, kept = sharded(at_rest(plan, grads), kept, resting, jnp.zeros(()))
    expected = by_path(params)
    for rest, placement in plan.placements.items():
        assert resting[rest].shape == placement.rest_shape
        for member, spec in enumerate(placement.members):
            found = as_is(resting[rest], placement, member)
            np.testing.assert_allclose(found, expected[spec.name], atol=atol, err_msg=spec.name)
    expected = by_path(state)
    assert {leaf.path for leaf in plan.leaves} == set(expected)
    for leaf in plan.leaves:
        found = kept[leaf.rests_in]
        if leaf.placement is not None:
            found = as_is(found, leaf.placement, leaf.member)
        assert found.dtype == expected[leaf.path].dtype
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (found, expected[leaf.path])),
            atol=2e-6 if found.dtype == jnp.float32 else 1e-2,
            rtol=1e-5,
            err_msg=leaf.path,
        )


def test_why_whole_arrays_are_needed_is_said():
    notes = {name: plan_for(make(), 8)[1].note for name, make in WHOLE.items()}
    assert "layers.0-2" in notes["one layer"]
    assert notes["finite"].endswith("of two different parameters' arrays")
    assert notes["adafactor"].startswith("the optimizer works on whole arrays: ")


def test_state_rests_sharded():
    _, plan = plan_for(optax.adam(1e-2), 8)
    assert {name for name, each in plan.resting.items() if each is None} == {"0.count"}
    assert plan.resting["0.mu.layers.0-2.kernel"].rest_shape == (3, 40)
    _, plan = plan_for(WHOLE["adafactor"](), 8)
    kept = {name: each for name, each in plan.resting.items() if each is None}
    assert all(leaf.shape in ((), (1,)) for leaf in plan.leaves if leaf.rests_in in kept)


def test_what_is_no_optimizer():
    optimizer = nnx.Optimizer(Layers(nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(ConfigurationError, match=r"got Optimizer; of an nnx.Optimizer"):
        plan_for(optimizer, 8)
