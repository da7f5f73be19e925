# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the document on JAX, acted out on eight devices.

The calls are the document's; names that it leaves undefined are filled in. `docs/documents.md`
lists the blocks, and says where a line had to change.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fullshard.jax import create_mesh, describe, gathered, shard, threshold

CLASSES = 10


class Block(nnx.Module):
    def __init__(self, d_model, rngs):
        self.attention = nnx.MultiHeadAttention(4, d_model, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x)


class LargeTransformer(nnx.Module):
    """Classifies sequences; as large as a test can bear."""

    def __init__(self, vocab_size, d_model, num_layers, rngs):
        self.embed = nnx.Embed(vocab_size, d_model, rngs=rngs)
        self.blocks = nnx.List([Block(d_model, rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(d_model, CLASSES, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = gathered(block)(x)
        return self.head(x.mean(axis=1))


def make_model():
    return LargeTransformer(vocab_size=96, d_model=16, num_layers=4, rngs=nnx.Rngs(0))


def data_loader(count):
    random = np.random.default_rng(0)
    for _ in range(count):
        tokens = random.integers(0, 96, (16, 8))
        yield {"input_ids": tokens, "label": tokens[:, 0] % CLASSES}


def loss_and_accuracy(model, batch):
    logits = model(batch["input_ids"])
    labels_onehot = jax.nn.one_hot(batch["label"], num_classes=CLASSES)
    loss = optax.softmax_cross_entropy(logits, labels_onehot).mean()
    predictions = jnp.argmax(logits, axis=-1)
    return loss, {"accuracy": jnp.mean(predictions == batch["label"])}


def create_fsdp_train_step():
    """The document's step; ``ModelAndOptimizer`` is Flax's name of today for what has a model."""

    @partial(jax.jit, donate_argnums=(0,))
    def train_step(state, batch):
        grad_fn = nnx.value_and_grad(loss_and_accuracy, has_aux=True)
        (loss, metrics), grads = grad_fn(state.model, batch)
        state.update(grads)
        return state, loss, metrics

    return train_step


def train_as_written(count):
    """Steps 1 to 4: losses, accuracies, and the table of shards."""
    mesh = create_mesh()
    model = shard(make_model(), mesh, threshold(64), at_most_unsharded=0.1)
    state = nnx.ModelAndOptimizer(model, optax.adam(learning_rate=1e-2))
    train_step = create_fsdp_train_step()
    data_sharding = NamedSharding(mesh, P("fsdp"))
    losses, accuracies = [], []
    for batch in data_loader(count):
        batch_sharded = jax.tree.map(lambda x: jax.device_put(x, data_sharding), batch)
        state, loss, metrics = train_step(state, batch_sharded)
        losses.append(float(loss))
        accuracies.append(float(metrics["accuracy"]))
    return losses, accuracies, describe(state.model)


def train_alone(count):
    """The same on one device."""
    model = make_model()
    state = nnx.ModelAndOptimizer(model, optax.adam(learning_rate=1e-2))
    train_step = create_fsdp_train_step()
    losses = []
    for batch in data_loader(count):
        state, loss, _ = train_step(state, jax.tree.map(jnp.asarray, batch))
        losses.append(float(loss))
    return losses


def place_by_name_and_first_dimension(model):
    """The document's rule: what is called kernel, along dimension 0, whatever its shape."""
    mesh = Mesh(np.array(jax.devices()), axis_names=("fsdp",))
    _, params = nnx.split(model)

    def shard_array(path, array):
        path_str = "/".join(str(p) for p in path)
        spec = P("fsdp") if array.size >= 32 and "kernel" in path_str else P()
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(shard_array, params)
