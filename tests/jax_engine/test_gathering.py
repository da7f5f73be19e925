# SPDX-License-Identifier: Apache-2.0
"""When a layer may be computed apart, what is rolled up, and what is said of either."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import communication, create_mesh, cross_entropy, gathered, make_train_step
from fullshard.jax.compute.per_example import Mixed, example_dims

B, N = 8, 4


def dims_of(function, *shapes):
    """Where examples are in the results of a function, of which all arguments are examples."""
    whole = jax.make_jaxpr(function)(*(jnp.zeros((B, *shape)) for shape in shapes))
    part = jax.make_jaxpr(function)(*(jnp.zeros((B // N, *shape)) for shape in shapes))
    return example_dims(whole.jaxpr, part.jaxpr, [0] * len(shapes), N)


W = jnp.ones((6, 6))


@jax.custom_jvp
def normed_in_backward(x):
    return x


@normed_in_backward.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] / jnp.linalg.norm(primals[0])


def attention(x):
    heads = (x @ W).reshape(*x.shape[:2], 2, 3)
    mixed = jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)
    return mixed.reshape(x.shape)


def convolution(x):
    kernel = jnp.ones((3, 6, 6))
    x = jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    return nnx.max_pool(x[:, :, None], (2, 1))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: jax.nn.softmax(x, -1) + jnp.zeros((x.shape[0], 1, 6)), [0]),
        (lambda x: x.reshape(x.shape[0] * 5, 6) @ W, [0]),
        (lambda x: x.transpose(1, 0, 2).mean(0), [0]),
        (lambda x: jnp.eye(6)[jnp.zeros(6, int)] + x.sum(1)[:, None], [0]),
        (lambda x: W[x[:, :, 0].astype(int)], [0]),
        (lambda x: (jnp.arange(5), x.swapaxes(0, 1)), [None, 1]),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[:, 0], x.swapaxes(0, 1)), [0, 1]),
        (jax.checkpoint(lambda x: jax.nn.relu(jnp.sort(x, 1))), [0]),
        (attention, [0]),
        (convolution, [0]),
    ],
)  # fmt: skip
def test_what_treats_examples_apart_is_seen(function, expected):
    assert dims_of(function, (5, 6)) == expected


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x - x.mean(0), "reduce_sum over the examples"),
        (lambda x: x / x.shape[0], "takes other values with fewer examples"),
        (lambda x: jnp.sort(x, axis=0), "sort over the examples"),
        (lambda x: jnp.cumsum(x, axis=0), "cumsum over the examples"),
        (lambda x: jnp.einsum("bij,cij->bc", x, x), "of examples with each other"),
        (lambda x: x[::-1], "nothing is known of rev"),
        (lambda x: x[:1] + x, "a slice of the examples"),
        (lambda x: x.swapaxes(0, 1).reshape(-1, 6), "spreads the examples"),
        (normed_in_backward, "reduce_sum over the examples"),
        (lambda x: x.reshape(2, -1), "spreads the examples"),
        (lambda x: jnp.ones(x.shape[0]) @ x[:, 0], "over the examples"),
        (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "random"),
        (lambda x: x + jnp.arange(x.shape[0])[:, None, None], "by the number of examples"),
        (lambda x: jax.lax.cond(x.sum() > 0, lambda: x, lambda: -x), "over the examples"),
        (lambda x: x if len(x) == B else x + 1, "it does something else"),
        (lambda x: jax.lax.scan(lambda c, y: (c + y, c), x[0], x), "over the examples|a slice"),
    ],
)
def test_what_mixes_examples_is_not_claimed(function, why):
    with pytest.raises(Mixed, match=why):
        dims_of(function, (5, 6))


class Normed(nnx.Module):
    """A layer whose statistics are of the whole batch."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Plain(nnx.Module):
    def __init__(self, layer, count=2):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([layer(rngs) for _ in range(count)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + gathered(layer)(x)
        return x


def linear(rngs):
    return nnx.Linear(6, 6, rngs=rngs)


VECTORS = next(models.vector_batches(1, 8, 6))


def test_a_layer_that_mixes_examples_is_left_to_xla_and_right():
    model = Plain(Normed)
    expected, _ = models.train_alone(Plain(Normed), optax.sgd(0.1), models.squared_error, [VECTORS])
    step = make_train_step(model, optax.sgd(0.1), models.squared_error, create_mesh(fsdp=4))
    state, loss, _ = step(step.init(), VECTORS)
    assert float(loss) == pytest.approx(expected[0], rel=1e-5)
    assert any("Normed is left to XLA: reduce_sum over the examples" in n for n in step.notes)
    assert not communication(step, VECTORS).of("reduce-scatter")
    alone = Plain(Normed)
    models.train_alone(alone, optax.sgd(0.1), models.squared_error, [VECTORS])
    found = step.gather_array(state, "other/layers.0.norm.mean")
    np.testing.assert_allclose(found, alone.layers[0].norm.mean[...], atol=1e-6)


def test_modules_that_treat_examples_apart_reduce_in_one_piece():
    step = make_train_step(
        Plain(linear, 3), optax.sgd(0.1), models.squared_error, create_mesh(fsdp=4)
    )
    expected, _ = models.train_alone(
        Plain(linear, 3), optax.sgd(0.1), models.squared_error, [VECTORS]
    )
    _, loss, _ = step(step.init(), VECTORS)
    assert float(loss) == pytest.approx(expected[0], rel=1e-5)
    assert step.notes == ["layers.0 to layers.2 are 3 equal layers"]
    assert [each.count for each in communication(step, VECTORS).of("reduce-scatter")] == [3]


class Varied(nnx.Module):
    def __init__(self, widths, factors=None):
        rngs = nnx.Rngs(0)
        self.factors = factors or [1.0] * len(widths)
        self.layers = nnx.List(
            [
                nnx.Sequential(nnx.Linear(6, w, rngs=rngs), nnx.Linear(w, 6, rngs=rngs))
                for w in widths
            ]
        )

    def __call__(self, x):
        outputs = []
        for factor, layer in zip(self.factors, self.layers, strict=True):
            x = x + factor * jnp.tanh(layer(x))
            outputs.append(x)
        return sum(outputs)


@pytest.mark.parametrize(
    ("model", "notes"),
    [
        (lambda: Varied([7, 7, 7]), ["layers.0 to layers.2 are 3 equal layers"]),
        (lambda: Varied([7, 7, 8]), ["layers.0 to layers.1 are 2 equal layers"]),
        (lambda: Varied([7, 7, 7], [1.0, 2.0, 3.0]), []),
    ],
)
def test_what_is_rolled_up_is_equal(model, notes):
    """Also where every layer's output is used behind the loop."""
    step = make_train_step(model(), optax.sgd(0.1), models.squared_error, create_mesh(fsdp=3))
    batch = {name: x[:6] for name, x in VECTORS.items()}
    expected, after = models.train_alone(model(), optax.sgd(0.1), models.squared_error, [batch])
    losses, params, _ = models.train_sharded(step, [batch])
    assert step.notes == notes
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, x in params.items():
        np.testing.assert_allclose(x, after[name], atol=1e-5)


def test_a_fault_of_the_loss_function_is_its_own_and_comes_first():
    traces = []

    def loss_fn(model, batch):
        traces.append(batch)
        return model(batch["x"]).no_such_method()

    def step_with(loss_fn, **options):
        model = models.Attention(nnx.Rngs(0))
        return make_train_step(model, optax.sgd(0.1), loss_fn, create_mesh(), **options)

    batch = next(models.vector_batches(1, 8, 2, 12))
    with pytest.raises(AttributeError, match="no_such_method"):
        step_with(loss_fn).lowered(batch)
    assert len(traces) == 1
    with pytest.raises(ConfigurationError, match=r"one number, .* got shape \(8, 12\)"):
        step_with(lambda model, batch: model(batch["x"])).lowered(batch)
    with pytest.raises(ConfigurationError, match=r"must return \(loss, tree of arrays\), got"):
        step_with(models.squared_error, has_aux=True).lowered(batch)
    with pytest.raises(ConfigurationError, match=r"expected \(\.\.\., width\), \(width, classes\)"):
        cross_entropy(jnp.ones((2, 3)), jnp.ones((4, 5)), jnp.ones(2, int))


def test_functions_within_functions_are_seen_through():
    """`jax.jit`, `nnx.jit` and `nnx.remat` around parts of a loss change nothing."""

    @jax.jit
    def loss_fn(params, batch):
        x, layers = batch["x"], params["layers"]
        inner = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
        for number in range(3):
            x = x + inner(layers[number], x)
        return ((x - batch["y"]) ** 2).mean()

    params = {"layers": jax.random.normal(jax.random.key(0), (3, 6, 6)) / 3}
    step = make_train_step(params, optax.sgd(0.1), loss_fn, create_mesh(fsdp=3))
    batch = {name: x[:6] for name, x in VECTORS.items()}
    expected, after = models.train_alone(params, optax.sgd(0.1), loss_fn, [batch])
    losses, found, _ = models.train_sharded(step, [batch])
    assert losses == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(found["layers"], after["layers"], atol=1e-5)
    largest = max(e.arrays[0][1] for e in communication(step, batch).of("all-gather"))
    assert largest <= 6 * 6


def test_stacks_that_are_changed_before_their_scan_stay_cut():
    """As users do: transposed, masked, merged with adapters, stacked by hand, penalised, in jit."""
    mask = np.tril(np.ones((16, 16), np.float32))

    def through(stack, x):
        body = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        return jax.lax.scan(body, x, stack)[0]

    def loss_fn(params, x):
        w, other = params["w"], params["other"]
        x = through(jnp.swapaxes(w, 1, 2) * 0.5, x) + through(w * mask, x)
        x = through(w / jnp.linalg.norm(w, axis=2, keepdims=True), x)
        x = through(other + params["a"] @ params["b"], x) + through(other[::-1], x)
        x = through(w.reshape(3, 1, 16, 16)[:, 0], x) + through(other[jnp.array([2, 0])], x)
        x = through(jax.jit(lambda p: jnp.stack(p))(params["list"]), x)
        x = through(jnp.concatenate([w, other]), x)
        return (x**2).mean() + 1e-3 * sum((w**2).sum() for w in jax.tree.leaves(params))

    keys = iter(jax.random.split(jax.random.key(0), 7))
    shapes = {"w": (3, 16, 16), "other": (3, 16, 16), "a": (3, 16, 2), "b": (3, 2, 16)}
    params = {name: jax.random.normal(next(keys), shape) / 4 for name, shape in shapes.items()}
    params["list"] = [jax.random.normal(next(keys), (16, 16)) / 4 for _ in range(3)]
    batch = VECTORS["x"].repeat(3, 1)[:, :16]
    step = make_train_step(params, optax.sgd(0.1), loss_fn, create_mesh())
    expected, after = models.train_alone(params, optax.sgd(0.1), loss_fn, [batch])
    losses, found, _ = models.train_sharded(step, [batch])
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, x in found.items():
        np.testing.assert_allclose(x, after[name], atol=2e-5)
    assert not any("gathered from" in note for note in step.notes)
    assert step.coverage == 1.0
    assert max(e.arrays[0][1] for e in communication(step, batch).of("all-gather")) <= 16 * 16


class LoRAParam(nnx.Param):
    pass


class Adapted(nnx.Module):
    """A frozen layer with a trained low-rank part beside it."""

    def __init__(self, rngs):
        self.base = nnx.Linear(6, 6, rngs=rngs)
        self.a = LoRAParam(jax.random.normal(rngs.params(), (6, 2)))
        self.b = LoRAParam(jnp.zeros((2, 6)))

    def __call__(self, x):
        return self.base(x) + x @ self.a @ self.b


def test_frozen_parameters_rest_and_stay():
    loss = models.squared_error
    step = make_train_step(
        Adapted(nnx.Rngs(0)), optax.adam(0.1), loss, create_mesh(fsdp=4), wrt=LoRAParam
    )
    losses, params, state = models.train_sharded(step, [VECTORS] * 2)
    expected, after = models.train_alone(
        Adapted(nnx.Rngs(0)), optax.adam(0.1), loss, [VECTORS] * 2, LoRAParam
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, x in params.items():
        np.testing.assert_allclose(x, after[name], atol=1e-5)
    assert {spec.path for spec in step.specs if spec.trainable} == {"a", "b"}
    assert set(state.optimizer[0].mu) == {"a", "b"}


def test_random_keys_are_those_of_one_device_and_differ_between_steps():
    def loss_fn(params, batch, key):
        noise = jax.random.uniform(key, batch.shape)
        return params["w"].sum() * noise.mean(), noise

    batch = np.ones(8, np.float32)
    key = jax.random.key(5)
    step = make_train_step(
        {"w": jnp.ones(3)}, optax.sgd(0.1), loss_fn, create_mesh(), has_aux=True, key=key
    )
    state, _, first = step(step.init(), batch)
    _, _, second = step(state, batch)
    assert (first != second).all()
    alone = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, 0), 0), (8,))
    np.testing.assert_array_equal(first, alone)


def test_equinox_is_a_pytree():
    eqx = pytest.importorskip("equinox", reason="its modules are needed")
    model = eqx.nn.MLP(12, 12, 10, 2, key=jax.random.key(0))

    def loss_fn(model, batch):
        return ((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2).mean()

    batch = next(models.vector_batches(1, 14, 12))
    step = make_train_step(model, optax.sgd(0.1), loss_fn, create_mesh(fsdp=7))
    state, loss, _ = step(step.init(), batch)
    assert float(loss) == pytest.approx(float(loss_fn(model, batch)), rel=1e-5)
    after = step.merged(state)
    assert isinstance(after, eqx.nn.MLP)
    assert float(loss_fn(after, batch)) < float(loss)


def test_arrays_that_cannot_be_are_refused():
    def tree_step(tree):
        return make_train_step(tree, optax.sgd(0.1), models.tree_error, create_mesh())

    with pytest.raises(ConfigurationError, match=r"2 arrays of the model would be called 'a\.b'"):
        tree_step({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)})
    whole = nnx.Dict(n=nnx.Param(jnp.arange(3)))
    with pytest.raises(ConfigurationError, match=r"'n' \(3,\) is int32, which cannot be trained"):
        tree_step(whole)


def test_what_stays_gathered_is_said_by_array():
    def loss_fn(params, batch):
        first, _ = jax.lax.scan(lambda x, w: (x + w.sum(), None), batch.sum(), params["rows"])
        factor = jax.lax.stop_gradient(params["factor"])
        step = lambda x: x * factor.mean()  # noqa: E731
        return first + jax.lax.while_loop(lambda x: x < 1, step, jax.lax.stop_gradient(first))

    params = {"rows": jnp.ones((64, 3)), "factor": jnp.full(8, 2.0)}
    batch = np.ones(8, np.float32)
    step = make_train_step(params, optax.sgd(0.1), loss_fn, create_mesh(fsdp=4))
    assert step.coverage == 1.0
    why = r"100.0% of all bytes .*\n  rows \(64, 3\), 768 B: gathered .*: a scan takes"
    with pytest.raises(ConfigurationError, match=why):
        step.lowered(batch)
    step = step.variant(at_most_unsharded=1.0)
    step.lowered(batch)
    assert any(
        "rows, 768 B, is gathered from beginning to end: a scan takes" in n for n in step.notes
    )
    assert any(n.endswith("a while loop uses it") for n in step.notes), step.notes
    assert step.coverage == 0.0
    assert "800 B gathered from beginning to end" in step.describe()


def test_a_mesh_that_the_user_has_set_changes_nothing():
    """`jax.set_mesh` puts a mesh into each operation of a trace."""

    def loss_fn(params, batch):
        x = jax.lax.with_sharding_constraint(batch, jax.P("fsdp"))
        layers = params.swapaxes(1, 2)  # on the pieces
        body = lambda x, w: (gathered(lambda w, x: jax.nn.relu(x @ w))(w, x), None)  # noqa: E731
        return (jax.lax.scan(jax.checkpoint(body), x, layers)[0] ** 2).mean()

    mesh, batch = create_mesh(fsdp=5), np.ones((10, 12), np.float32)  # 5 divides no weight
    with jax.set_mesh(mesh):
        params = jax.random.normal(jax.random.key(0), (3, 12, 12)) / 4
        step = make_train_step(np.asarray(params), optax.sgd(1.0), loss_fn, mesh)
        after, _, _ = step(step.init(), batch)
        expected = np.asarray(params - jax.grad(loss_fn)(params, batch))
        _, found = next(step.arrays(after))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert step.notes == []
    assert communication(step, batch).of("reduce-scatter")


def test_large_arrays_that_a_loss_closes_over_are_told(caplog):
    teacher = np.ones((512, 1024), np.float32)

    def loss_fn(params, batch):
        return ((batch @ params["w"] - batch @ jnp.asarray(teacher)) ** 2).mean()

    step = make_train_step(
        {"w": np.zeros((512, 1024), np.float32)}, optax.sgd(1.0), loss_fn, create_mesh(fsdp=2)
    )
    step.lowered(np.ones((2, 512), np.float32))
    assert "2.00 MiB of arrays that the function closes over are on every device" in caplog.text


def test_methods_and_keywords_of_layers():
    class Layer(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

        def scaled(self, x, by):
            return x + self.linear(x) * by

    def loss_fn(model, batch):
        x = gathered(model.scaled)(batch, by=2.0)
        return (
            gathered(lambda w, x, *, by: x @ w * by)(model.linear.kernel[...], x, by=3) ** 2
        ).mean()

    step = make_train_step(Layer(), optax.sgd(1.0), loss_fn, create_mesh(fsdp=2))
    batch = np.ones((4, 6), np.float32)
    _, loss, _ = step(step.init(), batch)
    assert float(loss) == pytest.approx(float(loss_fn(Layer(), batch)), rel=1e-5)
    assert step.notes == []
    assert len(communication(step, batch).of("reduce-scatter")) == 2


def test_layers_whose_gradients_differ_are_no_scan():
    """Forward is the same for all; what a rule of differentiation closes over is not."""

    def scaled(by):
        identity = jax.custom_vjp(lambda x: x)
        identity.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * by,))
        return identity

    def loss_of(scales):
        def loss_fn(params, batch):
            x = batch
            for weights, scale in zip(params, scales, strict=True):
                x = scaled(scale)(jax.nn.relu(x @ weights) + x)
            return (x**2).mean()

        return loss_fn

    params = list(jax.random.normal(jax.random.key(0), (3, 8, 8)) / 4)
    batch = np.ones((8, 8), np.float32)
    alike, other = (
        make_train_step(params, optax.sgd(1.0), loss_of(scales), create_mesh(fsdp=2))
        for scales in ((0.5,) * 3, (0.5, 1.0, 2.0))
    )
    alike.lowered(batch)
    assert alike.notes == ["0 to 2 are 3 equal layers"]
    after, _, _ = other(other.init(), batch)
    assert other.notes == []
    expected = jax.grad(loss_of((0.5, 1.0, 2.0)))(params, batch)
    for new, old, gradient in zip(after.params, params, expected, strict=True):
        np.testing.assert_allclose(old - new, gradient, atol=1e-5)
