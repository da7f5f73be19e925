# SPDX-License-Identifier: Apache-2.0
"""What models may do: drop out, keep statistics, freeze parameters, loop as they like."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import create_mesh, make_train_step


def one_step(model, loss_fn, batch, **options):
    mesh = options.pop("mesh", None) or create_mesh()
    step = make_train_step(model, optax.sgd(0.1), loss_fn, mesh, **options)
    state, loss, aux = step(step.init(), batch)
    return step, state, loss, aux


def assert_steps_like_one_device(model, loss_fn, batch, **options):
    wrt = options.get("wrt") or nnx.Param
    # Before, as training alone changes the model.
    step, state, loss, _ = one_step(model, loss_fn, batch, **options)
    losses, expected = models.train_alone(model, optax.sgd(0.1), loss_fn, [batch], wrt)
    np.testing.assert_allclose(loss, losses[0], rtol=1e-5)
    for key, x in step.arrays(state):
        np.testing.assert_allclose(x, expected[key.partition("/")[2]], atol=1e-5, err_msg=key)
    return step, state


class LoRAParam(nnx.Param):
    pass


class Adapted(nnx.Module):
    """A frozen model with a trained low-rank part beside its last layer."""

    def __init__(self, rngs):
        self.base = models.GPT(rngs)
        key = rngs.params()
        self.a = LoRAParam(jax.random.normal(key, (12, 2)))
        self.b = LoRAParam(jnp.zeros((2, models.VOCAB)))

    def __call__(self, tokens):
        return self.base(tokens) + self.base.embed(tokens) @ self.a @ self.b


class Plain(nnx.Module):
    """Layers one after the other; those of one width are equal."""

    def __init__(self, layer, widths=(6, 6, 6), **more):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([layer(width, rngs, **more) for width in widths])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(6, width, rngs=rngs)
        self.down = nnx.Linear(width, 6, rngs=rngs)
        self.factor = 1.0

    def __call__(self, x, weight=1.0):
        return x + self.factor * weight * self.down(jnp.tanh(self.up(x)))


class Wandering(Plain):
    """Uses its layers otherwise than in a chain: sums what they return."""

    def __call__(self, x):
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return sum(outputs)


class Peeking(Plain):
    """Takes a parameter out of a unit by hand."""

    def __init__(self):
        super().__init__(Layer)
        self.last = Layer(6, nnx.Rngs(1))

    def __call__(self, x):
        return self.last(super().__call__(x)) + self.last.up.kernel[0, 0]


class Telling(Plain):
    """Its layers tell the loss function more than they return, in a list that they are given."""

    def __call__(self, x):
        told = []
        for layer in self.layers:
            x = layer(x, told)
        return x + sum(told)


class TellingLayer(Layer):
    def __call__(self, x, told):
        told.append(self.up(x)[:, :6])
        return super().__call__(x)


class SowingLayer(Layer):
    def __call__(self, x):
        self.kept = nnx.Intermediate(self.up(x)[:, :6])
        return super().__call__(x)


class Sowing(Plain):
    def __call__(self, x):
        x = super().__call__(x)
        return x + sum(layer.kept[...] for layer in self.layers)


class Turning(Plain):
    """Changes attributes of its layers in the forward."""

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            layer.factor = float(number)
            x = layer(x)
        return x


class Setting(Plain):
    """Sets a count that its first layer has."""

    def __call__(self, x):
        counter = self.layers[0].counter
        counter.set_value(jnp.full((), 3.0))
        return super().__call__(x)


class CountingLayer(Layer):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.counter = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        return super().__call__(x, self.counter[...])


class Refilling(Plain):
    """Gives each layer another weight in one and the same NumPy array."""

    def __call__(self, x):
        weight = np.zeros(1, np.float32)
        for number, layer in enumerate(self.layers):
            weight[0] = number
            x = layer(x, weight)
        return x


BATCH = next(models.token_batches(1, 16))
VECTORS = next(models.vector_batches(1, 16, 6))
VECTORS["y"] = VECTORS["y"][:, :6]


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (
            lambda: Wandering(Layer),
            "no scan: layers from layers.0 on: what layers.0 returned went elsewhere",
        ),
        (Peeking, "gathered from the beginning to the end: last.up.kernel is used outside"),
        (
            lambda: Plain(Layer, (6, 6, 7)),
            "layers.2 is not stacked with the blocks before it: layers.2.down.kernel is ",
        ),
    ],
)
def test_models_that_do_not_fit_are_right_and_said(make, note):
    step, _ = assert_steps_like_one_device(make(), models.squared_error, VECTORS)
    assert any(each.startswith(note) for each in step.notes), step.notes


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda: Telling(TellingLayer), "layers.0.__call__ changes its arguments"),
        (lambda: Sowing(SowingLayer), "layers.0.__call__ changes the module itself"),
        (lambda: Turning(Layer), "attributes of layers.0 were changed by the loss function"),
        (lambda: Setting(CountingLayer), "layers.0.counter is set outside of the methods of"),
        (lambda: Refilling(Layer), "layers.1 was called with other values than the first layer"),
        (lambda: Plain(Layer, (6, 6, 7, 7)), "layers.2 to layers.3 are 2 equal layers"),
    ],
    ids=["argument", "variable", "attribute", "value", "array", "two stacks"],
)
def test_side_effects_are_not_lost(make, note):
    step, _ = assert_steps_like_one_device(make(), models.squared_error, VECTORS)
    assert any(note in each for each in step.notes), step.notes


def test_no_collective_waits_in_a_branch_that_only_some_devices_take():
    class Skipping(Plain):
        def __call__(self, x):
            for layer in self.layers:
                x = jax.lax.cond(x.sum() > 0, layer, lambda x: x, x)
            return x

    signs = np.repeat([1.0, -1.0], 8).astype(np.float32)[:, None]
    batch = {**VECTORS, "x": np.abs(VECTORS["x"]) * signs}
    step, _, loss, _ = one_step(Skipping(Layer), models.squared_error, batch)
    alone = Skipping(Layer)
    parts = [jax.tree.map(lambda x, n=n: x[2 * n : 2 * n + 2], batch) for n in range(8)]
    expected = np.mean([models.squared_error(alone, part) for part in parts])
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert step.notes[-1].endswith("a unit is called in a branch or a while loop")


def test_scan_that_is_demanded_and_impossible():
    uneven = Plain(Layer, (6, 6, 7))
    text = r"'layers.2' cannot be stacked .* layers.2.down.kernel is Param \(7, 6\) float32, "
    with pytest.raises(ConfigurationError, match=text):
        one_step(uneven, models.squared_error, VECTORS, scan=True)
    with pytest.raises(ConfigurationError, match=r"scan=True, but layers from layers.0 on: what"):
        one_step(Wandering(Layer), models.squared_error, VECTORS, scan=True)
    with pytest.raises(ConfigurationError, match=r"scan=True, but layers.0.__call__ changes its"):
        one_step(Telling(TellingLayer), models.squared_error, VECTORS, scan=True)
    with pytest.raises(ConfigurationError, match=r"no nnx\.List"):
        one_step(models.Attention(nnx.Rngs(0)), models.squared_error, BATCH, scan=True)


def test_frozen_parameters_rest_and_stay():
    model = Adapted(nnx.Rngs(0))
    before = nnx.to_pure_dict(nnx.state(model.base.norm))
    step, state = assert_steps_like_one_device(model, models.cross_entropy, BATCH, wrt=LoRAParam)
    trained = {spec.path for spec in step.specs if spec.trainable}
    assert trained == {"a", "b"}
    np.testing.assert_array_equal(
        step.gather_array(state, "parameters/base.norm.scale"), before["scale"]
    )
    text = step.compiled(BATCH).as_text()
    assert len(models.collectives(text)["reduce-scatter"]) == 2


def test_statistics_are_averaged_and_a_merged_model_outlives_the_state():
    batch = next(models.image_batches(1, 16))
    model = models.ConvNet(nnx.Rngs(0))
    step = make_train_step(model, optax.sgd(0.1), models.cross_entropy, create_mesh())
    state = step.init()
    merged = step.merged(state)
    after, _, _ = step(state, batch)
    # Each device's mean counts half, of parts of equal size.
    expected = model.conv1(jnp.asarray(batch["x"])).mean((0, 1, 2)) / 2
    found = step.gather_array(after, "other/norm.mean")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found).max() > 0
    np.testing.assert_array_equal(merged.norm.mean[...], np.zeros(6))
    with pytest.raises(ConfigurationError, match="was used up by a step before: go on with"):
        step(state, batch)


def test_dropout_differs_between_devices_layers_and_steps():
    def loss_fn(model, batch):
        dropped = model(jnp.ones_like(batch["x"])) == 0
        return 0.0 * dropped.mean(), {"dropped": jnp.packbits(dropped, axis=None)}

    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            kept = [layer(x) != 0 for layer in self.layers]
            return jnp.stack(kept).astype(jnp.float32) * self.scale[...]

    step = make_train_step(
        Dropping(nnx.Rngs(0)), optax.sgd(0.1), loss_fn, create_mesh(fsdp=2), has_aux=True
    )
    batch = {"x": np.ones((2, 64), np.float32)}
    seen = []
    state = step.init()
    for _ in range(2):
        state, _, aux = step(state, batch)
        seen.append(np.asarray(aux["dropped"]))
    assert (seen[0] != seen[1]).any()
    halves = np.split(seen[0], 2)
    assert (halves[0] != halves[1]).any()
    # A mean of two devices' bytes: were their draws equal, it would be a whole number.
    assert (seen[0] != np.round(seen[0])).any()
    assert step.gather_array(state, "other/layers.0.rngs.count") == 2


def test_a_key_that_the_model_keeps_is_another_in_each_step():
    class Splitting(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))
            self.key = nnx.Variable(jax.random.key(0))

        def __call__(self, x):
            self.key[...], mine = jax.random.split(self.key[...])
            return self.scale[...] * jax.random.normal(mine, x.shape)

    step = make_train_step(
        Splitting(), optax.set_to_zero(), models.squared_error, create_mesh(fsdp=2)
    )
    state, first, _ = step(step.init(), VECTORS)
    assert float(step(state, VECTORS)[1]) != float(first)


def test_aux_is_averaged_and_a_key_differs():
    def loss_fn(params, batch, key):
        noise = jax.random.uniform(key)
        return (params["w"] * batch).mean(), {"mean": batch.mean(), "noise": noise}

    batch = np.arange(16, dtype=np.float32)
    step = make_train_step(
        {"w": jnp.ones(3).sum()},
        optax.sgd(0.1),
        loss_fn,
        create_mesh(),
        has_aux=True,
        key=jax.random.key(5),
    )
    state, loss, first = step(step.init(), batch)
    state, _, second = step(state, batch)
    assert float(first["mean"]) == 7.5
    assert float(loss) == pytest.approx(22.5)
    assert float(first["noise"]) != float(second["noise"])


def test_equinox_is_a_pytree():
    eqx = pytest.importorskip("equinox", reason="its modules are needed")
    model = eqx.nn.MLP(12, 12, 10, 1, key=jax.random.key(0))

    def loss_fn(model, batch):
        return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean()

    batch = next(models.vector_batches(1, 16, 12))
    step, state, loss, _ = one_step(model, loss_fn, batch)
    assert float(loss) == pytest.approx(float(loss_fn(model, batch)), rel=1e-5)
    after = step.merged(state)
    assert isinstance(after, eqx.nn.MLP)
    assert float(loss_fn(after, batch)) < float(loss)


def test_a_fault_of_the_loss_function_is_its_own():
    def loss_fn(model, batch):
        return model(batch["x"]).no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        one_step(models.GPT(nnx.Rngs(0)), loss_fn, BATCH)
    with pytest.raises(ConfigurationError, match=r"one number, .* got shape \(2, 4, 19\)"):
        one_step(models.GPT(nnx.Rngs(0)), lambda model, batch: model(batch["x"]), BATCH)
    with pytest.raises(ConfigurationError, match=r"must return \(loss, tree of arrays\), got"):
        one_step(
            models.make_tree(),
            models.tree_error,
            next(models.vector_batches(1, 8, 12)),
            has_aux=True,
        )


def test_a_fault_in_one_batch_changes_nothing_for_the_next():
    step = make_train_step(Plain(Layer), optax.sgd(0.1), models.squared_error, create_mesh())
    before = list(step.notes)
    with pytest.raises(KeyError):
        step(step.init(), {"x": VECTORS["x"]})
    step(step.init(), VECTORS)
    assert step.notes == before


def test_arrays_that_cannot_be_are_refused():
    def tree_step(tree):
        return make_train_step(tree, optax.sgd(0.1), models.tree_error, create_mesh())

    with pytest.raises(ConfigurationError, match=r"2 arrays of the model would be called 'a\.b'"):
        tree_step({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)})
    whole = nnx.Dict(n=nnx.Param(jnp.arange(3)))
    with pytest.raises(ConfigurationError, match=r"'n' \(3,\) is int32, which cannot be trained"):
        tree_step(whole)
