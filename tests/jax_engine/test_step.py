# SPDX-License-Identifier: Apache-2.0
"""What a compiled step holds, what a state gives and takes, and what is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import (
    Rule,
    communication,
    create_mesh,
    gathered,
    generate,
    make_train_step,
    scan_layers,
    threshold,
)

BATCH = next(models.token_batches(1, 48))


@functools.cache
def gpt():
    return models.GPT(nnx.Rngs(0), layers=2)


def step_of(devices=8, **options):
    make = options.pop("make", None) or gpt()
    tx = options.pop("tx", optax.adam(1e-2))
    mesh = options.pop("mesh", None) or create_mesh(fsdp=devices)
    return make_train_step(make, tx, options.pop("loss_fn", models.cross_entropy), mesh, **options)


def test_layers_are_gathered_one_by_one_and_reduced_in_one_piece():
    """A stack of layers with one call in the scan's body: what travels is counted by hand."""
    width, layers = 64, 6
    sizes = {"w": (layers, width, 4 * width), "v": (layers, 4 * width, width), "b": (layers, width)}

    def make():
        keys = jax.random.split(jax.random.key(0), 3)
        return {
            name: jax.random.normal(key, shape) / 8
            for key, (name, shape) in zip(keys, sizes.items(), strict=True)
        }

    def layer(weights, x):
        return x + jnp.tanh(x @ weights["w"]) @ weights["v"] + weights["b"]

    def loss_fn(params, batch):
        body = jax.checkpoint(lambda x, weights: (gathered(layer)(weights, x), None))
        return (jax.lax.scan(body, batch, params)[0] ** 2).mean()

    step = make_train_step(make, optax.adam(1e-2), loss_fn, create_mesh())
    state = step.init()
    batch = np.random.default_rng(0).normal(size=(16, width)).astype(np.float32)
    for _ in range(10):
        state, *_ = step(state, batch)
    assert step.compilations == 1
    assert step.notes == []
    found = communication(step, batch)
    one = 4 * (2 * 4 * width * width + width)  # bytes of a layer
    assert [(e.count, e.sent_bytes) for e in found.of("reduce-scatter")] == [
        (layers, layers * one * 7 // 8)
    ]
    assert sum(e.count for e in found.of("all-gather")) == 2 * layers
    assert sum(e.sent_bytes for e in found.of("all-gather")) == 2 * layers * one * 7 // 8
    assert all(e.arrays[0][1] == 1 for e in found.of("all-reduce")), str(found)
    assert not found.of("all-to-all") + found.of("collective-permute")
    memory = step.compiled(batch).memory_analysis()
    rest = layers * one // 8
    assert memory.alias_size_in_bytes > 0.99 * 3 * rest
    assert memory.temp_size_in_bytes < 1.1 * rest + 6 * one


def test_equal_layers_of_a_list_are_scanned_and_gathered_one_by_one():
    def scanned(model, batch):
        x = model.embed(batch["x"])
        x = scan_layers(model.blocks)(x, nnx.make_causal_mask(batch["x"]))
        logits = model.out(model.norm(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def make():
        return models.GPT(nnx.Rngs(0), width=32, layers=3, heads=8)

    step = step_of(make=make, loss_fn=scanned)
    found = communication(step, BATCH)
    assert 3 in {each.count for each in found.of("reduce-scatter")}
    assert max(e.arrays[0][1] for e in found.of("all-gather")) <= 13 * 32 * 32


def test_bf16_is_gathered_and_fp32_reduced():
    def loss_fn(params, batch):
        return (gathered(lambda w, x: x @ w["w"])(params, batch) ** 2).mean()

    step = make_train_step(
        {"w": jnp.ones((12, 16))}, optax.sgd(0.1), loss_fn, create_mesh(), precision="bfloat16"
    )
    batch = np.ones((8, 12), np.float32)
    text = step.lowered(batch).as_text()
    gathers = re.findall(r'"stablehlo.all_gather".*?-> tensor<[\dx]*x(\w+)>', text)
    assert set(gathers) == {"bf16"}
    reduces = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<[\dx]*x(\w+)>', text, re.DOTALL)
    assert reduces == ["f32"]
    found = communication(step, batch)
    assert {dtype for each in found.of("all-gather") for dtype, _ in each.arrays} == {"f32"}


def test_nothing_is_ever_whole_when_a_model_is_made():
    step = step_of(make=lambda: models.GPT(nnx.Rngs(0), width=64, layers=2, heads=8))
    program = jax.jit(step._program.begin, out_shardings=step._rests).lower({}).compile()
    for array in jax.tree.leaves(program({})):
        if array.size > 64:
            assert array.addressable_shards[0].data.size * 8 == array.size, array.shape
    text = program.as_text()
    assert "f32[64,32]" in text
    assert not re.search(r"f32\[(64,256|256,64)\]", text)


def test_a_state_goes_from_8_devices_to_6():
    many, few = (step_of(n, make=models.make_tree(), loss_fn=models.tree_error) for n in (8, 6))
    batches = list(models.vector_batches(3, 48, 12))
    state = many.init()
    for batch in batches[:2]:
        state, *_ = many(state, batch)
    shapes = jax.tree.map(lambda x: x.shape, few.abstract_state())
    assert shapes == jax.tree.map(lambda x: x.shape, state)
    moved = jax.device_get(state)
    after = [float(step(each, batches[2])[1]) for step, each in ((many, state), (few, moved))]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_evaluation_and_features_come_from_the_state():
    step = step_of(3, make=models.ConvNet(nnx.Rngs(0)), loss_fn=models.cross_entropy)
    state = step.init()
    batch = next(models.image_batches(1, 6))
    model = step.merged(state)
    model.eval()
    assert float(step.evaluate(state, batch)) == pytest.approx(
        float(models.cross_entropy(model, batch)), rel=1e-5
    )
    features = step.apply(state, lambda model, x: model.conv1(x), batch["x"][:5])  # uneven
    np.testing.assert_allclose(features, model.conv1(batch["x"][:5]), atol=1e-5)
    step(state, batch)  # the state is as it was


def test_two_losses_over_one_state():
    """As a GAN trains: each optimizer moves its own part, and both see the whole model."""

    def loss_fn(params, batch):
        return models.tree_error({**params, "scale": 1.0}, batch)

    tree = {"layers": models.make_tree()["layers"]}
    batch = next(models.vector_batches(1, 12, 12))
    first, second = (
        make_train_step(
            tree,
            optax.sgd(0.1),
            loss_fn,
            create_mesh(fsdp=3),
            wrt=lambda name, n=n: f".{n}." in name,
        )
        for n in (0, 1)
    )
    one, other = first.init(), second.init()
    one, _, _ = first(one, batch)
    other, _, _ = second(dataclasses.replace(other, params=one.params), batch)
    moved = models.held(other.params)
    expected = tree
    for n in (0, 1):
        grads = jax.grad(loss_fn)(expected, batch)["layers"][n]
        layers = list(expected["layers"])
        layers[n] = jax.tree.map(lambda x, g: x - 0.1 * g, layers[n], grads)
        expected = {"layers": layers}
    for n in (0, 1):
        for name, x in expected["layers"][n].items():
            np.testing.assert_allclose(moved[f"layers.{n}.{name}"], x, atol=1e-6)


def test_what_comes_in_is_checked():
    step = step_of(3)
    state = step.init()
    with pytest.raises(ConfigurationError, match=r"batch\['x'\] has shape \(4, 4\): 3 devices x"):
        step(state, {"x": BATCH["x"][:4], "y": BATCH["y"][:4]})
    with pytest.raises(ConfigurationError, match=r"'y'\] has shape \(3, 4\), .*'x'\] has 6 rows"):
        step(state, {"x": BATCH["x"][:6], "y": BATCH["y"][:3]})
    with pytest.raises(ConfigurationError, match="batch is a int, expected an array"):
        step(state, 3)
    with pytest.raises(ConfigurationError, match=r"lacks 'optimizer.0.trace.blocks"):
        step_of(3, tx=optax.sgd(0.1, momentum=0.9))(state, BATCH)
    with pytest.raises(ConfigurationError, match=r"has beside 'params.more': another model or opt"):
        step(dataclasses.replace(state, params={**state.params, "more": 1}), BATCH)
    half = jax.tree.map(lambda x: x[:1], state.params)
    with pytest.raises(ConfigurationError, match=r"has shape \(1,.*, the step expects \("):
        step(dataclasses.replace(state, params=half), BATCH)
    with pytest.raises(ConfigurationError, match="expected a TrainState, got dict"):
        step({}, BATCH)
    with pytest.raises(ConfigurationError, match="do not divide its 0 rows"):
        step(state, {"x": BATCH["x"][:0], "y": BATCH["y"][:0]})
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    with pytest.raises(ConfigurationError, match=r"is bfloat16, the step expects float32"):
        step(dataclasses.replace(state, params=half), BATCH)
    tree_step = step_of(3, make=models.make_tree(), loss_fn=models.tree_error)
    tree_state = tree_step.init()
    with pytest.raises(ConfigurationError, match="dict has no cache: give decoder="):
        generate(tree_step, tree_state, np.zeros((1, 2)), 3)


def test_arrays_of_a_state_may_lie_elsewhere():
    """On the host, on one device or on all: they are moved, and nothing is compiled again."""
    step = step_of(4, make=models.make_tree(), loss_fn=models.tree_error, tx=optax.sgd(0.1))
    batch = next(models.vector_batches(1, 12, 12))
    whole = jax.sharding.NamedSharding(step.mesh, jax.P())
    elsewhere = (
        lambda x: x,
        np.asarray,
        lambda x: jax.device_put(np.asarray(x), jax.devices()[5]),
        lambda x: jax.device_put(x, whole),
    )
    losses = []
    for move in elsewhere:
        state = step.init()
        state = dataclasses.replace(state, params=jax.tree.map(move, state.params))
        losses.append(float(step(state, jax.tree.map(torch_like, batch))[1]))
    assert losses == losses[:1] * len(elsewhere)
    assert step.compilations == 1


def test_arrays_of_64_bits_train_as_jax_has_them():
    """As `numpy.random` makes them; JAX has 32 bits of each unless it is told otherwise."""
    tree = {"w": np.random.default_rng(0).normal(size=(12, 8)), "counts": np.arange(4)}
    assert tree["w"].dtype == np.float64

    def loss_fn(params, batch):
        return ((batch @ params["w"]) ** 2).mean() * params["counts"].sum()

    batch = np.ones((4, 12), np.float32)
    step = step_of(4, make=tree, loss_fn=loss_fn, tx=optax.sgd(0.1))
    state, loss, _ = step(step.init(), batch)
    assert float(loss) == pytest.approx(float(loss_fn(tree, batch)), rel=1e-5)
    assert state.params["w"].dtype == np.float32
    step(state, batch)


def test_a_function_may_make_what_is_no_array_and_nothing_leaks():
    """As an Equinox module has functions and numbers among its leaves."""

    def make():
        return {"w": jax.random.normal(jax.random.key(0), (8, 8)), "f": jnp.tanh, "times": 2}

    def loss_fn(params, batch):
        layer = jax.checkpoint(lambda x, _: (params["f"](x @ params["w"]), None))
        return (jax.lax.scan(layer, batch, None, params["times"])[0] ** 2).mean()

    batch = np.ones((8, 8), np.float32)
    with jax.checking_leaks():
        step = step_of(2, make=make, loss_fn=loss_fn)
        step.lowered(batch)
    found = step.merged(step.init())
    assert found["f"] is jnp.tanh
    np.testing.assert_allclose(found["w"], make()["w"], rtol=1e-6)


def torch_like(array):
    """Make an object that NumPy takes for an array, and JAX does not."""

    class Other:
        def __array__(self, dtype=None, copy=None):
            return array

    return Other()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"remat": "all"}, "remat='all' is none of True, False, 'matmuls'"),
        ({"depth": 3}, "unknown option 'depth'; known: mode, remat"),
        ({"accumulate": 0}, "at least 1 micro-batch"),
        ({"precision": "bf16"}, "unknown dtype 'bf16'"),
        ({"rule": Rule(replicate=("no_such",))}, "pattern 'no_such' matches no array"),
        ({"wrt": nnx.BatchStat}, "selects no parameter; paths are like: "),
        ({"mesh": create_mesh(fsdp=4, tensor=2)}, "no rule says what to cut along it"),
        ({"mode": "shard_map"}, "mode='shard_map' is none of 'weights', 'jit'"),
        ({"key": 3}, "key=3: expected a random key"),
        ({"rule": {"head": 0}}, "expected a fullshard.jax.Rule"),
        ({"mesh": 8}, "expected a jax.sharding.Mesh"),
        (
            {"make": jax.eval_shape(models.make_tree), "wrt": "up"},
            "wrt='up': of a pytree it is a p",
        ),
        ({"make": {"n": np.ones(3, int)}}, "dict has no arrays to be trained"),
        (
            {
                "mesh": create_mesh(fsdp=4, tensor=2),
                "rule": Rule(tensor={"up.kernel": 1}, tensor_axis="x"),
            },
            "along 'x', which is no axis of the mesh",
        ),
        ({"rule": threshold(10**6), "at_most_unsharded": 0.1}, r"100.0% of all bytes would be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_asked_for_is_checked(options, text):
    with pytest.raises(ConfigurationError, match=text):
        step_of(**options)


def test_a_step_describes_itself():
    step = step_of(6)
    lines = step.describe().splitlines()
    row = next(line for line in lines if line.startswith("blocks.0.up.kernel"))
    assert "P(None, 'fsdp')" in row
    assert row.split()[-1] == f"{12 * 48 * 4 // 6:,}"
    assert "% of all bytes sharded" in lines[-1]


def test_merged_is_the_model():
    step = step_of(7)
    found = step.merged(step.init())
    assert isinstance(found, models.GPT)
    assert nnx.graphdef(found) == nnx.graphdef(gpt())
    whole, expected = (
        dict(nnx.to_flat_state(nnx.state(each, nnx.Param))) for each in (found, gpt())
    )
    assert whole.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(whole[path][...], leaf[...], err_msg=str(path))
