# SPDX-License-Identifier: Apache-2.0
"""Saving and resuming, on as many devices or others."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fullshard.core.errors import ConfigurationError
from fullshard.jax import create_mesh, make_train_step, restore_state, save_state

ALL = ("parameters", "optimizer", "other", "step")
BATCH = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.linear(x)))


class Net(nnx.Module):
    """Stacked layers, arrays that no number of devices divides, statistics, and random state."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.out = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def step_on(devices, model=Net, tx=None):
    def loss(model, batch):
        return jnp.square(model(batch)).mean()

    mesh = create_mesh(fsdp=devices)
    return make_train_step(model, tx or optax.adam(0.1), loss, mesh)


def arrays(step, state):
    return {key: (x.dtype, x.shape, x.tobytes()) for key, x in step.arrays(state, ALL)}


def test_eight_devices_to_six_and_back_is_equal_bit_for_bit(tmp_path):
    on_8, on_6 = step_on(8), step_on(6)
    state, _, _ = on_8(on_8.init(), BATCH)
    save_state(tmp_path / "a", on_8, state)
    expected = arrays(on_8, state)
    moments = [key for key in expected if key.startswith("optimizer/") and "layers.1" in key]
    assert moments
    assert int(np.frombuffer(expected["step/step"][2], np.int32)[0]) == 1

    of_6 = restore_state(tmp_path / "a", on_6)
    assert arrays(on_6, of_6) == expected
    save_state(tmp_path / "b", on_6, of_6)
    back = restore_state(tmp_path / "b", on_8)
    assert arrays(on_8, back) == expected
    # Read back in place, by each device; and training goes on as if it had never stopped.
    again = restore_state(tmp_path / "a", on_8)
    assert arrays(on_8, again) == expected
    results = [on_8(each, BATCH) for each in (state, back, again)]
    assert len({float(loss) for _, loss, _ in results}) == 1
    after = [arrays(on_8, each) for each, _, _ in results]
    assert after[0] == after[1] == after[2] != expected
    assert on_8.compilations == 1


TREE = {"w": jnp.ones((3, 4)), "b": jnp.ones(5)}


def test_what_has_no_elements_is_there_again(tmp_path):
    def step_on_tree(devices):
        tree = {
            "none": jnp.ones((0, 3)),
            "w": jnp.ones(4, jnp.bfloat16),
            "mask": jnp.ones((2, 0), bool),
        }
        mesh = create_mesh(fsdp=devices)
        return make_train_step(tree, optax.adam(0.1), None, mesh)

    one, other = step_on_tree(2), step_on_tree(3)
    save_state(tmp_path / "a", one, one.init())
    expected = arrays(one, one.init())
    assert arrays(one, restore_state(tmp_path / "a", one)) == expected
    assert arrays(other, restore_state(tmp_path / "a", other)) == expected


def tree_step(tree=TREE, tx=None):
    def loss(tree, batch):
        return sum(x.sum() for x in tree.values()) + 0 * batch.mean()

    mesh = create_mesh(fsdp=3)
    return make_train_step(tree, tx or optax.sgd(0.1), loss, mesh)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: tree_step({**TREE, "w": jnp.ones((4, 3))}),
            r"parameters/w is float32 of shape \[3, 4\] in the checkpoint .*, float32 of shape .4",
        ),
        (
            lambda: tree_step({**TREE, "w": TREE["w"].astype(jnp.bfloat16)}),
            "parameters/w is float32 of shape .* in the checkpoint .*, bfloat16 of",
        ),
        (
            lambda: tree_step(tx=optax.sgd(0.1, momentum=0.9)),
            r"another model or optimizer: it lacks \['optimizer/0\.trace\.b', .*2 and 0 in all",
        ),
        (
            lambda: tree_step({"w": TREE["w"]}),
            r"it lacks \[\], and has \['parameters/b'\]",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, other, message):
    step = tree_step()
    save_state(tmp_path / "a", step, step.init())
    with pytest.raises(ConfigurationError, match=message):
        restore_state(tmp_path / "a", other())


def test_what_is_no_checkpoint_or_is_there_already_is_refused(tmp_path):
    step = tree_step()
    with pytest.raises(ConfigurationError, match="exists: a checkpoint is a new folder"):
        save_state(tmp_path, step, step.init())
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigurationError, match="is no checkpoint of save_state"):
            restore_state(path, step)
