# SPDX-License-Identifier: Apache-2.0
"""What models may do: drop out, keep statistics, freeze parameters, loop as they like."""

import equinox as eqx
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


class Wandering(models.GPT):
    """Uses its blocks otherwise than in a chain: sums what they return."""

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        outputs = []
        for block in self.blocks:
            x = block(x, mask)
            outputs.append(x)
        return self.out(self.norm(sum(outputs)))


class Peeking(models.GPT):
    """Takes a parameter out of a unit by hand."""

    def __call__(self, tokens):
        return super().__call__(tokens) + self.embed.embedding[0, 0] * self.norm.bias.sum()


class Uneven(models.GPT):
    """Its last block is of another shape."""

    def __init__(self, rngs, **block):
        super().__init__(rngs, **block)
        self.blocks.append(models.Block(12, rngs, inner=2))


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


BATCH = next(models.token_batches(1, 16))


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (Wandering, "no scan: layers from blocks.0 on: what blocks.0 returned went elsewhere"),
        (Peeking, "gathered from the beginning to the end: embed.embedding is used outside"),
        (Uneven, "blocks.3 is not stacked with the blocks before it: blocks.3.down.kernel is "),
    ],
)
def test_models_that_do_not_fit_are_right_and_said(make, note):
    step, _ = assert_steps_like_one_device(make(nnx.Rngs(0)), models.cross_entropy, BATCH)
    assert any(each.startswith(note) for each in step.notes), step.notes


def test_scan_that_is_demanded_and_impossible():
    uneven = Uneven(nnx.Rngs(0))
    text = r"'blocks.3' cannot be stacked .* blocks.3.down.kernel is Param \(24, 12\) float32, "
    with pytest.raises(ConfigurationError, match=text):
        one_step(uneven, models.cross_entropy, BATCH, scan=True)
    with pytest.raises(ConfigurationError, match=r"scan=True, but layers from blocks.0 on: what"):
        one_step(Wandering(nnx.Rngs(0)), models.cross_entropy, BATCH, scan=True)
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


def test_statistics_are_averaged_over_devices():
    batch = next(models.image_batches(1, 16))
    step, state, _, _ = one_step(models.ConvNet(nnx.Rngs(0)), models.cross_entropy, batch)
    found = step.gather_array(state, "other/norm.mean")
    model = models.ConvNet(nnx.Rngs(0))
    means = []
    for part in np.split(batch["x"], 8):
        fresh = nnx.clone(model)
        fresh(jnp.asarray(part))
        means.append(fresh.norm.mean[...])
    np.testing.assert_allclose(found, np.mean(means, axis=0), atol=1e-6)
    assert np.abs(found).max() > 0


def test_conv_net_without_statistics_is_one_device():
    model = models.ConvNet(nnx.Rngs(0))
    model.eval()
    batch = next(models.image_batches(1, 16))
    assert_steps_like_one_device(model, models.cross_entropy, batch, remat="matmuls")


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
