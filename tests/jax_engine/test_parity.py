# SPDX-License-Identifier: Apache-2.0
"""Sharded training is training: the same losses and parameters as on one device, exactly.

Each case is one way to write a model; together they are on each of 2 to 7 devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from support import jax_models as models
from support.sampling import survey

from fullshard.core.errors import ConfigurationError
from fullshard.jax import (
    Rule,
    create_mesh,
    cross_entropy,
    embed,
    gathered,
    make_train_step,
    scan_layers,
)

WIDTH = 12
LINEN = linen.Sequential([linen.Dense(7), jnp.tanh, linen.Dense(12)])


def adam():
    # A large epsilon: else parameters whose true gradient is zero move by normalised noise.
    matrices = functools.partial(jax.tree.map, lambda x: x.ndim >= 2)
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-3, mask=matrices))


def gpt(**options):
    return models.GPT(nnx.Rngs(0), layers=2, **options)


class Stacked(nnx.Module):
    """Layers made by `nnx.vmap`."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda keys: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(params=keys)))
        self.layers = make(jax.random.split(rngs.params(), 3))
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def stack():
    keys = jax.random.split(jax.random.key(2), 3)
    return {
        "embed": jax.random.normal(keys[0], (models.VOCAB, WIDTH)) / 4,
        "layers": {
            "w": jax.random.normal(keys[1], (3, WIDTH, WIDTH)) / 4,
            "b": jnp.zeros((3, WIDTH)),
        },
        "head": jax.random.normal(keys[2], (WIDTH, models.VOCAB)) / 4,
    }


def stack_loss(params, batch):
    """The JAX way: a scan over stacked layers, recomputed, and each gathered where it is used."""

    def layer(weights, x):
        return x + jax.nn.silu(x @ weights["w"] + weights["b"])

    @jax.checkpoint
    def body(x, weights):
        return gathered(layer)(weights, x), None

    x, _ = jax.lax.scan(body, embed(params["embed"], batch["x"]), params["layers"])
    return cross_entropy(x, params["head"], batch["y"]).mean()


def contrastive(params, batch):
    """Every example against every other of the batch."""
    first, second = params["layers"]
    one = jnp.tanh(batch["x"] @ first["w"] + first["b"])
    other = jnp.tanh(batch["y"] @ second["w"].T)
    scores = one @ other.T * params["scale"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores))).mean()


def scanned(model, batch):
    x = model.embed(batch["x"])
    x = scan_layers(model.blocks)(x, nnx.make_causal_mask(batch["x"]))
    return cross_entropy(model.norm(x), model.out.kernel[...], batch["y"]).mean()


def one_by_one(model, batch):
    x = embed(model.embed.embedding[...], batch["x"])
    for block in model.blocks:
        x = gathered(block)(x, mask=nnx.make_causal_mask(batch["x"]))
    return cross_entropy(model.norm(x), model.out.kernel[...], batch["y"]).mean()


def tied(model, batch):
    table = model.embed.embedding[...]
    x = embed(table, batch["x"])
    x = scan_layers(model.blocks)(x, nnx.make_causal_mask(batch["x"]))
    return cross_entropy(model.norm(x), table, batch["y"], classes_first=True).mean()


def stacked_error(model, batch):
    x = scan_layers(model.layers, lambda layer, x: x + jnp.tanh(layer(x)))(batch["x"])
    return ((model.out(x) - batch["y"]) ** 2).mean()


def linen_init():
    """Variables of Flax Linen: nested dicts under the names of their modules."""
    return LINEN.init(jax.random.key(4), jnp.ones((1, 12)))


def linen_loss(variables, batch):
    return ((LINEN.apply(variables, batch["x"]) - batch["y"]) ** 2).mean()


def conv_net():
    return models.ConvNet(nnx.Rngs(0))  # in training: statistics are those of the whole batch


TOKENS = functools.partial(models.token_batches, 3)
VECTORS = functools.partial(models.vector_batches, 3)
IMAGES = functools.partial(models.image_batches, 3)
CE, SE = models.cross_entropy, models.squared_error

CASES = {
    "list": (lambda: gpt(dropout=0.3), CE, TOKENS, 6, {}),
    "list, scanned": (lambda: gpt(dropout=0.3), scanned, TOKENS, 6, {}),
    "list, gathered": (gpt, one_by_one, TOKENS, 4, {"remat": "matmuls", "check": True}),
    "tied": (lambda: gpt(tied=True), tied, TOKENS, 3, {"remat": False}),
    "stacked module": (
        lambda: Stacked(nnx.Rngs(0)), stacked_error, lambda n: VECTORS(n, WIDTH), 4, {},
    ),
    "stack": (stack, stack_loss, TOKENS, 7, {"check": True}),
    "stack, activations": (stack, stack_loss, TOKENS, 6, {"batch_axes": ("data",)}),
    "stack, jit": (stack, stack_loss, TOKENS, 2, {"mode": "jit"}),
    "tree": (models.make_tree, models.tree_error, lambda n: VECTORS(n, 12), 3, {}),
    "linen": (linen_init, linen_loss, lambda n: VECTORS(n, 12), 6, {}),
    "batch norm": (conv_net, CE, IMAGES, 5, {}),
    "contrastive": (models.make_tree, contrastive, lambda n: VECTORS(n, 12), 6, {}),
    "accumulated": (stack, stack_loss, TOKENS, 4, {"accumulate": 3}),
}  # fmt: skip


@functools.cache
def trained_alone(make, loss_fn, batches, rows):
    return models.train_alone(make(), adam(), loss_fn, list(batches(rows)))


def assert_trains_alike(name, mesh=None, rows=None, **more):
    make, loss_fn, batches, devices, options = CASES[name]
    mesh = mesh or create_mesh(fsdp=devices)
    rows = rows or 2 * mesh.size * options.get("accumulate", 1)
    step = make_train_step(make(), adam(), loss_fn, mesh, **options | more)
    losses, params, state = models.train_sharded(step, batches(rows))
    expected_losses, expected = trained_alone(make, loss_fn, batches, rows)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert params.keys() <= expected.keys()
    for key, x in params.items():
        size = max(np.abs(expected[key]).max(), 1e-2)  # some have no gradient but noise
        np.testing.assert_allclose(x, expected[key], atol=1e-5 * size, err_msg=key)
    assert step.compilations == 1
    return step, state


SURVEYED = ("list", "stack", "tree", "linen", "contrastive")  # others have what these have


@pytest.mark.parametrize("name", [survey(name) if name in SURVEYED else name for name in CASES])
def test_training_is_that_of_one_device(name):
    step, _ = assert_trains_alike(name)
    left = [note for note in step.notes if "left to XLA" in note]
    assert len(left) == (name == "list, scanned"), left  # dropout


def test_hybrid_and_tensor_meshes_give_the_same():
    step, _ = assert_trains_alike("stack", create_mesh(data=2, fsdp=3))
    assert step.axes.batch == ("data", "fsdp")
    mesh = create_mesh(fsdp=4, tensor=2)
    with pytest.raises(ConfigurationError, match="tensor=2 does not divide dimension 1 of 'layers"):
        assert_trains_alike("tree", mesh, rule=Rule(tensor={r"0\.w": 1}))
    step, _ = assert_trains_alike("stack", mesh, rule=Rule(tensor={r"layers\.w": 2}))
    cut = {each.name: each.axes for each in step.placements}
    assert cut["layers.w"] == (None, "fsdp", "tensor")
    assert "layers.w" not in step.outside  # gathered tells XLA where


def test_a_users_own_mesh():
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("replica", "model"), axis_types=kinds)
    with pytest.raises(ConfigurationError, match="say which one cuts parameters, as shard_axis="):
        assert_trains_alike("tree", mesh)
    assert_trains_alike("tree", mesh, shard_axis="model", batch_axes=("replica", "model"))
    explicit = jax.make_mesh((6,), ("x",), devices=jax.devices()[:6])
    assert_trains_alike("stack", explicit)


def test_bf16_is_that_of_one_device():
    def cast(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    batches = list(TOKENS(4))
    alone = models.train_alone(stack(), adam(), lambda p, b: stack_loss(cast(p), b), batches)
    step = make_train_step(stack(), adam(), stack_loss, create_mesh(fsdp=2), precision="bfloat16")
    losses, params, _ = models.train_sharded(step, batches)
    np.testing.assert_allclose(losses, alone[0], rtol=5e-3)
    assert {x.dtype for x in params.values()} == {np.dtype(np.float32)}


def test_a_haiku_model_is_a_pytree(monkeypatch):
    hk = pytest.importorskip("haiku", reason="its modules are needed")
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([10, 12])(x)))
    begin = net.init(jax.random.key(0), jnp.ones((1, 12)))

    def loss_fn(params, batch):
        return ((net.apply(params, batch["x"]) - batch["y"]) ** 2).mean()

    case = lambda: begin, loss_fn, lambda n: VECTORS(n, 12), 4, {}
    monkeypatch.setitem(CASES, "haiku", case)
    assert_trains_alike("haiku")


def test_results_of_each_example_come_in_order():
    traces = []

    def loss_fn(params, batch):
        traces.append(batch)
        errors = ((batch["x"] @ params["layers"][0]["w"]) ** 2).mean(-1)
        return errors.mean(), {"errors": errors, "worst": errors.max()}

    batch = next(models.vector_batches(1, 12, 12))
    tree = models.make_tree()
    expected = loss_fn(tree, batch)[1]
    for accumulate in (1, 2):
        step = make_train_step(
            tree,
            optax.sgd(0.1),
            loss_fn,
            create_mesh(fsdp=3),
            has_aux=True,
            accumulate=accumulate,
        )
        traces.clear()
        _, _, aux = step(step.init(), batch)
        assert len(traces) == 1
        np.testing.assert_allclose(aux["errors"], expected["errors"], rtol=1e-5)
    assert float(aux["worst"]) <= float(expected["worst"])
