# SPDX-License-Identifier: Apache-2.0
"""Small models for the JAX engine, as users write them, and training of one on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fullshard.jax.placing import by_path, key_data, to_host

VOCAB = 19


class Block(nnx.Module):
    def __init__(self, width, rngs, dropout=0.0, heads=4, inner=4):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, decode=False, use_bias=False, rngs=rngs
        )
        self.up = nnx.Linear(width, inner * width, rngs=rngs)
        self.down = nnx.Linear(inner * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.dropout(self.down(jax.nn.gelu(self.up(x))))


class GPT(nnx.Module):
    def __init__(self, rngs, width=12, layers=3, tied=False, **block):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs, **block) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.out = None if tied else nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return self.embed.attend(x) if self.out is None else self.out(x)


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 6, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs, momentum=0.5)
        self.conv2 = nnx.Conv(6, 5, (3, 3), rngs=rngs)
        self.head = nnx.Linear(5 * 9, VOCAB, rngs=rngs)

    def __call__(self, images):
        x = jax.nn.relu(self.norm(self.conv1(images)))
        x = nnx.avg_pool(jax.nn.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.head(x.reshape(x.shape[0], -1))


class Attention(nnx.Module):
    """Flax's own attention, whose 4 heads 8 devices do not divide."""

    def __init__(self, rngs):
        self.mix = nnx.MultiHeadAttention(4, 12, qkv_features=8, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.mix(x)[:, 0]


def cross_entropy(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def squared_error(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make_tree():
    """A pytree model: two layers, one of odd shape, and a scalar."""
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "layers": [
            {"w": jax.random.normal(keys[0], (12, 7)) / 4, "b": jnp.zeros(7)},
            {"w": jax.random.normal(keys[1], (7, 12)) / 4, "b": jnp.zeros(12)},
        ],
        "scale": jnp.ones(()),
    }


def tree_error(params, batch):
    first, second = params["layers"]
    hidden = jnp.tanh(batch["x"] @ first["w"] + first["b"])
    found = params["scale"] * (hidden @ second["w"] + second["b"])
    return ((found - batch["y"]) ** 2).mean()


def token_batches(count, rows, positions=4, seed=0):
    random = np.random.default_rng(seed)
    shape = (rows, positions)
    for _ in range(count):
        x = random.integers(0, VOCAB, shape).astype(np.int32)
        yield {"x": x, "y": (x * 3 + 1) % VOCAB}


def image_batches(count, rows, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        x = random.normal(size=(rows, 6, 6, 1)).astype(np.float32)
        yield {"x": x, "y": random.integers(0, VOCAB, rows).astype(np.int32)}


def vector_batches(count, rows, *shape, seed=0):
    random = np.random.default_rng(seed)
    for _ in range(count):
        x = random.normal(size=(rows, *shape)).astype(np.float32)
        yield {"x": x, "y": np.tanh(x.reshape(rows, -1)[:, :12])}


def train_alone(model, tx, loss_fn, batches, wrt=nnx.Param):
    """Losses and parameters by path of plain training on one device."""
    losses = []
    if isinstance(model, nnx.Module):
        optimizer = nnx.Optimizer(model, tx, wrt=wrt)

        @nnx.jit
        def step(model, optimizer, batch):
            chosen = nnx.DiffState(0, wrt)
            loss, grads = nnx.value_and_grad(loss_fn, argnums=chosen)(model, batch)
            optimizer.update(model, grads)
            return loss

        for batch in batches:
            losses.append(float(step(model, optimizer, jax.tree.map(jnp.asarray, batch))))
        flat = nnx.to_flat_state(nnx.state(model))
        return losses, {".".join(map(str, path)): leaf.get_raw_value() for path, leaf in flat}

    @jax.jit
    def tree_step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(model)
    for batch in batches:
        model, state, loss = tree_step(model, state, batch)
        losses.append(float(loss))
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return losses, {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def train_sharded(step, batches):
    """Losses, parameters by path, and the last state of a sharded step."""
    state, losses = step.init(), []
    for batch in batches:
        state, loss, _ = step(state, batch)
        losses.append(float(loss))
    return losses, held(state.params), state


def held(tree):
    """The whole arrays of a tree by path, on the host."""
    return {name: to_host(key_data(x)) for name, x in by_path(tree).items()}


def collectives(text):
    """The result shapes of each kind of collective in a compiled program."""
    kinds = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    found = {kind: [] for kind in kinds}
    for line in text.splitlines():
        for kind in kinds:
            if f" {kind}(" in line or f" {kind}-start(" in line:
                found[kind].append(line.split(" = ")[1].split(f" {kind}")[0])
    return found
