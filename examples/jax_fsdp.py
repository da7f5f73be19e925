# SPDX-License-Identifier: Apache-2.0
"""Fully sharded training in JAX: mesh, rules, collectives, memory, and a training loop.

    python examples/jax_fsdp.py [--steps 40] [--save weights.safetensors]

Uses all devices there are; on a CPU, eight simulated ones. A small transformer learns to write the
text of this file, byte by byte.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

# Must be set before JAX looks for devices; means nothing to GPUs and TPUs.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fullshard.jax import (
    Rule,
    communication,
    create_mesh,
    describe_mesh,
    make_train_step,
    memory_analysis,
    save_weights,
    scan_layers,
    selective,
    threshold,
)

WIDTH, LAYERS, HEADS, LENGTH = 64, 4, 4, 64
ROWS = 2  # for each device
TEXT = np.frombuffer(Path(__file__).read_bytes(), np.uint8)

Batch = dict[str, np.ndarray]


# ---- the model: plain Flax, and one word that says what travels together -------------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        return self.out(self.norm(scan_layers(self.blocks)(x, mask)))


def loss_and_accuracy(model: Transformer, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Means over the whole batch, as on one device."""
    logits = model(batch["input_ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def batches(rows: int) -> Iterator[Batch]:
    """Global batches, which the step cuts along their rows: a part for each device."""
    random = np.random.default_rng(0)
    while True:
        starts = random.integers(0, len(TEXT) - LENGTH - 1, rows)
        windows = np.stack([TEXT[start : start + LENGTH + 1] for start in starts]).astype(np.int32)
        yield {"input_ids": windows[:, :-1], "label": windows[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", type=Path, help="write the weights to this safetensors file")
    args = parser.parse_args()

    # 1. A mesh: all devices in one row, the axis "fsdp".
    mesh = create_mesh()
    print(describe_mesh(mesh))

    # 2. What is sharded. By default everything is, whatever its shape.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    make = lambda: Transformer(nnx.Rngs(0))  # noqa: E731 - made sharded, never whole on a device
    rules = {
        "everything": Rule(),
        "from 1,024 elements on": threshold(1024),
        "only what is huge": selective(16_384),
        "all but norms": Rule(replicate=(r"norm",)),
    }
    for name, rule in rules.items():
        step = make_train_step(make, optimizer, loss_and_accuracy, mesh, rule=rule, has_aux=True)
        resting = sum(each.rest_bytes for each in step.placements)
        print(f"  {name:24}{step.coverage:>8.1%} of bytes sharded {resting:>9,} bytes per device")

    # 3. The train step. Layers are scanned, gathered one by one, and recomputed in backward.
    step = make_train_step(make, optimizer, loss_and_accuracy, mesh, has_aux=True)
    data = batches(ROWS * mesh.size)
    batch = next(data)

    # 4. What it needs, with sharding and without, before anything is allocated.
    print(f"\n{memory_analysis(step, batch)}")

    # 5. What it sends: gathers in forward and backward, and reduce-scatters of gradients.
    print(f"\n{communication(step, batch)}\n")

    # 6. Training.
    state = step.init()
    for number in range(1, args.steps + 1):
        state, loss, aux = step(state, next(data))
        if number % 10 == 0 or number == 1:
            print(f"step {number}: loss {float(loss):.4f}, accuracy {float(aux['accuracy']):.2%}")
    print(f"compiled {step.compilations} time(s)")

    # 7. The weights, whole and in their true shapes, gathered one array after the other.
    if args.save:
        save_weights(args.save, state)
        print(f"saved {args.save}")


if __name__ == "__main__":
    main()
