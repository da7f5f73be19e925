# SPDX-License-Identifier: Apache-2.0
"""Layers that are gathered and computed apart, those left to XLA, and what is said of either."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import (
    communication,
    create_mesh,
    cross_entropy,
    embed,
    gathered,
    make_train_step,
    scan_layers,
)
from fullshard.jax.layers import Tracing, tracing, used_outside

VECTORS = next(models.vector_batches(1, 8, 6))


def in_step(function, *args, params=None, devices=4, **options):
    """Result and gradient, in a step and alone, of a loss over ``params``; and the step."""
    tx, mesh = optax.sgd(1.0), create_mesh(fsdp=devices)
    step = make_train_step(params, tx, function, mesh, **options)
    batch = args[0] if len(args) == 1 else args
    state, loss, _ = step(step.init(), batch)
    expected, grads = jax.value_and_grad(lambda p: function(p, batch))(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), params, state.params)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    return step, batch


def weights(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) / 4


# ---- layers that are computed apart ----------------------------------------------------------


def test_arguments_with_examples_are_told_from_others_by_shapes():
    """Eight rows, eight positions, eight heads: only what must have as many rows is cut."""
    x = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)
    positions, heads = np.arange(64.0).reshape(8, 8) / 64, np.arange(8.0)[:, None, None] / 8
    mask = np.arange(8)[:, None, None] > np.arange(8)[None, :, None]

    def layer(w, x, positions, mask, heads, factor, *, more):
        x = jnp.where(mask, x + (positions @ positions)[:, :1], 0) * factor
        scores = jnp.einsum("btw,bsw->bts", x, x)[:, None] * heads
        return x + jax.nn.softmax(scores.sum(1), -1) @ (x @ w) + more.sum(), x[..., :2]

    def loss(w, x):
        args = (jnp.asarray(positions), jnp.asarray(mask), jnp.asarray(heads), 0.5)
        y, z = gathered(layer)(w, x, *args, more=jnp.ones((8, 3)))
        return (y**2).mean() + z.mean()

    step, batch = in_step(loss, x, params=weights(16, 16), devices=8)
    assert step.notes == []
    assert communication(step, batch).of("reduce-scatter")


def test_keys_and_caches_of_each_example_pass():
    def layer(w, x, keys, cache):
        noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
        return x @ w + noise, {"k": cache["k"].at[:, 1].set(x)}

    def loss(w, x):
        keys = jax.random.split(jax.random.key(0), len(x))
        y, cache = gathered(layer)(w, x, keys, {"k": jnp.zeros((8, 3, 6))})
        return (y**2).mean() + (cache["k"] ** 2).mean()

    step, _ = in_step(loss, VECTORS["x"], params=weights(6, 8)[:, :6])
    assert step.notes == []


def test_a_scan_over_time_in_a_layer_gathers_once():
    """As an LSTM's: its weights are constants of the scan."""

    def recurrent(w, xs):
        def cell(h, x):
            h = jnp.tanh(x @ w["x"] + h @ w["h"])
            return h, None

        return jax.lax.scan(cell, xs[:, 0], xs.swapaxes(0, 1))[0]

    xs = np.random.default_rng(0).normal(size=(8, 20, 8)).astype(np.float32)
    params = {"x": weights(8, 8), "h": weights(8, 8, seed=1)}
    step, batch = in_step(lambda w, x: (gathered(recurrent)(w, x) ** 2).mean(), xs, params=params)
    found = communication(step, batch)
    assert {each.count for each in found.collectives} == {1}
    assert step.outside == {}
    plain, batch = in_step(lambda w, x: (recurrent(w, x) ** 2).mean(), xs, params=params)
    assert set(plain.outside.values()) == {"gathered(layer)(weights, x) around the loop"}
    assert [note.partition(",")[0] for note in plain.notes] == ["h", "x"]


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


def test_a_mesh_that_the_user_has_set_changes_nothing():
    """`jax.set_mesh` puts a mesh into each operation of a trace."""

    def loss_fn(params, batch):
        x = jax.lax.with_sharding_constraint(batch, jax.P("fsdp"))
        layers = params.swapaxes(1, 2)
        body = lambda x, w: (gathered(lambda w, x: jax.nn.relu(x @ w))(w, x), None)  # noqa: E731
        return (jax.lax.scan(jax.checkpoint(body), x, layers)[0] ** 2).mean()

    mesh, batch = create_mesh(fsdp=4), np.ones((8, 12), np.float32)
    with jax.set_mesh(mesh):
        params = jax.random.normal(jax.random.key(0), (3, 12, 12)) / 4
        step = make_train_step(np.asarray(params), optax.sgd(1.0), loss_fn, mesh)
        after, _, _ = step(step.init(), batch)
        expected = np.asarray(params - jax.grad(loss_fn)(params, batch))
    np.testing.assert_allclose(after.params, expected, atol=1e-5)
    assert step.notes == []
    assert communication(step, batch).of("reduce-scatter")


# ---- layers that are left to XLA -------------------------------------------------------------


class Normed(nnx.Module):
    """A layer whose statistics are of the whole batch."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("layer", [Normed, Noisy])
def test_a_module_that_changes_its_own_state_is_left_to_xla_and_right(layer):
    def loss(model, batch):
        x = batch["x"]
        for block in model.layers:
            x = x + gathered(block)(x)
        return ((x - batch["y"]) ** 2).mean()

    def make():
        rngs = nnx.Rngs(0)
        return nnx.Dict(layers=nnx.List([layer(rngs), layer(rngs)]))

    alone = make()
    expected, _ = models.train_alone(alone, optax.sgd(0.1), loss, [VECTORS])
    step = make_train_step(make(), optax.sgd(0.1), loss, create_mesh(fsdp=2), at_most_unsharded=1.0)
    state, found, _ = step(step.init(), VECTORS)
    assert float(found) == pytest.approx(expected[0], rel=1e-5)
    assert step.notes == [f"{layer.__name__} is left to XLA: it changes its own state, as of "
                          "statistics or random numbers"]  # fmt: skip
    if layer is Normed:
        mean = state.other["layers.0.norm.mean"]
        np.testing.assert_allclose(mean, alone.layers[0].norm.mean[...], atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda w, x: (x @ w, (x @ w).mean()), r"a result \(\) has no dimension of examples"),
        (lambda w, x: (x @ w).reshape(4, 2, 6), "shape|reshape"),
        (
            lambda w, x: x @ w + jax.random.normal(jax.random.key(0), x.shape),
            "random numbers of all examples from one key",
        ),
        (lambda w, x: x[:6] @ w, "divide the examples|no dimension"),
    ],
)
def test_what_is_no_layer_apart_is_left_to_xla_and_right(layer, why):
    def loss(w, x):
        return sum((y**2).mean() for y in jax.tree.leaves(gathered(layer)(w, x)))

    step, _ = in_step(loss, VECTORS["x"], params=weights(6, 6), devices=2)
    (note,) = step.notes
    assert note.startswith("<lambda> is left to XLA: ")
    assert __import__("re").search(why, note)


@pytest.mark.parametrize(
    "layer",
    [
        lambda w, x: x @ w - (x @ w).mean(0),
        lambda w, x: x @ w / len(x),
        lambda w, x: jnp.cumsum(x @ w, axis=0),
        lambda w, x: (x @ w)[::-1],
    ],
)
def test_a_layer_that_mixes_examples_is_named_by_the_check(layer):
    def loss(w, x):
        x = gathered(lambda w, x: jnp.tanh(x @ w))(w, x)
        return (gathered(layer)(w, x) ** 2).mean()

    layer.__name__ = "mixer"
    step = make_train_step(weights(6, 6), optax.sgd(1.0), loss, create_mesh(fsdp=2), check=True)
    with pytest.raises(ConfigurationError, match=r"^mixer mixes examples: .* differ by \d+"):
        step(step.init(), VECTORS["x"])


# ---- equal layers ----------------------------------------------------------------------------


def test_lists_stacks_and_equinox_modules_are_scanned():
    eqx = pytest.importorskip("equinox", reason="its modules are needed")
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = [eqx.nn.MLP(6, 6, 8, 1, key=key) for key in keys]

    def loss(blocks, batch):
        layer = lambda block, x, by: x + jax.vmap(block)(x) * by  # noqa: E731
        return ((scan_layers(blocks, layer)(batch["x"], 0.5) - batch["y"]) ** 2).mean()

    arrays = eqx.filter(blocks, eqx.is_array)
    step = make_train_step(blocks, optax.sgd(0.1), loss, create_mesh(fsdp=2))
    losses, _, _ = models.train_sharded(step, [VECTORS])
    expected = blocks[0](VECTORS["x"][0]) is not None and loss(blocks, VECTORS)
    assert losses == pytest.approx([float(expected)], rel=1e-5)
    assert [each.count for each in communication(step, VECTORS).of("reduce-scatter")] == [3]
    assert jax.tree.leaves(arrays)
    assert step.notes == []


@pytest.mark.parametrize(
    ("blocks", "where"),
    [
        ([{"w": jnp.ones((6, 6))}, {"w": jnp.ones((6, 7))}], "blocks 0 and 1 differ in w"),
        ([{"w": jnp.ones(6), "by": 1.0}, {"w": jnp.ones(6), "by": 2.0}], "differ in by"),
        ([{"w": jnp.ones(6)}, {"v": jnp.ones(6)}], "differ in structure"),
        ([], "no blocks"),
    ],
)
def test_blocks_that_differ_are_refused(blocks, where):
    with pytest.raises(ConfigurationError, match=where):
        scan_layers(blocks, lambda block, x: x)(jnp.ones((2, 6)))


def test_what_is_no_layer_or_remat_is_refused():
    with pytest.raises(ConfigurationError, match="gathered\\(layer\\)\\(weights, x\\)"):
        gathered(np.ones((8, 8)))
    for wrong in (lambda: gathered(len, remat="matmul"), lambda: scan_layers([{}], len, remat=2)):
        with pytest.raises(ConfigurationError, match="is none of True, False, 'matmuls'"):
            wrong()


def test_modules_that_differ_are_refused():
    rngs = nnx.Rngs(0)
    blocks = [nnx.Dropout(rate, rngs=rngs) for rate in (0.1, 0.2)]
    with pytest.raises(ConfigurationError, match=r"gathered\(block\)\(x\), one by one"):
        scan_layers(blocks)(jnp.ones((2, 6)))


# ---- tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "positions", "tied", "mesh"),
    [((15, 8), 40, True, {"fsdp": 4}), ((400, 6), 3, False, {"fsdp": 2, "data": 2})],
)
def test_tables_give_what_they_give_whole(table, positions, tied, mesh):
    classes, width = table
    draw = np.random.default_rng(0)
    params = {"table": weights(classes, width), "head": weights(width, classes, seed=1)}
    x, y = (draw.integers(0, classes, (8, positions)) for _ in "xy")
    head = "table" if tied else "head"

    def loss(params):
        hidden = jnp.tanh(embed(params["table"], x))
        losses = cross_entropy(hidden, params[head], y, classes_first=tied)
        return (losses * (y % 3 == 0)).sum()

    expected = jax.value_and_grad(loss)(params)
    step = make_train_step(
        params, optax.sgd(1.0), lambda *_: None, create_mesh(**mesh), at_most_unsharded=1.0
    )
    here = step.init().params

    def traced(params):
        with tracing(Tracing(step.axes, {each.name: each for each in step.placements})):
            return jax.value_and_grad(loss)(params)

    found = jax.jit(traced)(here)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


def test_tables_do_not_travel_where_tokens_are_fewer():
    batch = {name: np.zeros((8, 2), np.int32) for name in "xy"}
    params = {"table": weights(1000, 16), "odd": weights(1001, 16), "head": weights(16, 1001)}

    def loss(params, batch):
        hidden = embed(params["table"], batch["x"]) + embed(params["odd"], batch["y"])
        return cross_entropy(hidden, params["head"], batch["y"]).mean()

    step, batch = in_step(loss, batch, params=params)
    found = communication(step, batch)
    # A quarter of each is turned, there and back.
    assert found.sent_bytes < 0.5 * (params["head"].nbytes + params["table"].nbytes)
    assert max(numel for e in found.of("all-gather") for _, numel in e.arrays) <= 16 * 16
    assert step.outside == {}


# ---- arrays outside, and what a step may hold ------------------------------------------------


def test_arrays_that_xla_gathers_are_named_with_the_call_to_write():
    def loss(params, batch):
        x = jax.jit(lambda t, i: t.T.T[i] * 2)(params["table"], batch)
        body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w.T), None))
        x, _ = jax.lax.scan(body, x, params["stack"].astype(jnp.float32))
        x = gathered(lambda w, x: x @ w)(params["apart"], x)
        x = jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x + params["loop"][0], x)
        return (x @ params["head"]).mean() + (params["bias"] ** 2).sum()

    names = ["apart", "bias", "head", "loop", "stack", "table"]
    shapes = {"table": (32, 16), "stack": (3, 16, 16), "apart": (16, 16), "head": (16, 32),
              "bias": (32,), "loop": (16,)}  # fmt: skip
    params = {name: jax.ShapeDtypeStruct(shapes[name], np.float32) for name in names}
    step = make_train_step(params, optax.sgd(1.0), loss, create_mesh(fsdp=2))

    def flat(*leaves):
        with tracing(Tracing(step.axes, {each.name: each for each in step.placements})):
            return loss(dict(zip(names, leaves[:-1], strict=True)), leaves[-1])

    traced = jax.make_jaxpr(flat)(*params.values(), jax.ShapeDtypeStruct((4,), np.int32))
    outside = used_outside(traced.jaxpr, names)
    assert set(outside) == {"table", "stack", "head", "loop"}
    assert outside["table"] == "embed(table, tokens)"
    assert "cross_entropy(hidden, head, targets)" in outside["head"]


def test_large_arrays_that_a_loss_closes_over_are_told(caplog):
    teacher = np.ones((512, 1024), np.float32)

    def loss_fn(params, batch):
        return ((batch @ params["w"] - batch @ jnp.asarray(teacher)) ** 2).mean()

    step = make_train_step(
        {"w": np.zeros((512, 1024), np.float32)}, optax.sgd(1.0), loss_fn, create_mesh(fsdp=2)
    )
    step.lowered(np.ones((2, 512), np.float32))
    assert "2.00 MiB of arrays that the loss closes over are on every device" in caplog.text


def test_a_fault_of_the_loss_function_is_its_own_and_comes_first():
    traces = []

    def loss_fn(model, batch):
        traces.append(batch)
        return model(batch["x"]).no_such_method()

    def step_with(loss_fn, **options):
        model = models.Attention(nnx.Rngs(0))
        return make_train_step(model, optax.sgd(0.1), loss_fn, create_mesh(fsdp=2), **options)

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


# ---- what is trained -------------------------------------------------------------------------


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
        Adapted(nnx.Rngs(0)), optax.adam(0.1), loss, create_mesh(fsdp=2), wrt=LoRAParam
    )
    losses, params, state = models.train_sharded(step, [VECTORS] * 2)
    expected, after = models.train_alone(
        Adapted(nnx.Rngs(0)), optax.adam(0.1), loss, [VECTORS] * 2, LoRAParam
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, x in params.items():
        np.testing.assert_allclose(x, after[name], atol=1e-5)
    assert set(state.optimizer[0].mu) == {"a", "b"}


def test_random_keys_are_those_of_one_device_and_differ_between_steps():
    def loss_fn(params, batch, key):
        noise = jax.random.uniform(key, batch.shape)
        return params["w"].sum() * noise.mean(), noise

    batch = np.ones(8, np.float32)
    key = jax.random.key(5)
    step = make_train_step(
        {"w": jnp.ones(8)}, optax.sgd(0.1), loss_fn, create_mesh(), has_aux=True, key=key
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
    step = make_train_step(model, optax.sgd(0.1), loss_fn, create_mesh(fsdp=2))
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
