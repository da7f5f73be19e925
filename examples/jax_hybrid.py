# SPDX-License-Identifier: Apache-2.0
"""Two-dimensional meshes in JAX: shards within groups of devices, and matrices cut twice.

    python examples/jax_hybrid.py [--steps 20]

Trains one model in three layouts of eight devices (on a CPU simulated ones), with equal losses, and
prints what each layout holds and sends:

- fsdp=8: every array in eight slices;
- data=2 x fsdp=4: two groups, say one for each host; slices lie within a group, and only the
  slices of gradients cross between groups;
- fsdp=4 x tensor=2: the two matrices of each layer are cut along a second dimension, too, and
  each device computes with its half of them.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx

from fullshard.jax import Rule, compare, create_mesh, describe_mesh, make_train_step, scan_layers

WIDTH, INNER, LAYERS = 64, 256, 3
ROWS = 4  # for each device


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.down = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return scan_layers(self.layers)(x)


def squared_error(model: Network, batch: dict[str, jax.Array]) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    # Along the tensor axis: the columns of the first matrix, and the rows of the second that
    # meet them. Between the two nothing has to be exchanged.
    rule = Rule(tensor={r"up\.kernel": 1, r"up\.bias": 0, r"down\.kernel": 0})
    devices = len(jax.devices())
    layouts = {
        f"fsdp={devices}": (create_mesh(), None),
        f"data=2 x fsdp={devices // 2}": (create_mesh(data=2), None),
        f"fsdp={devices // 2} x tensor=2": (create_mesh(tensor=2), rule),
    }
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS * devices, WIDTH)).astype(np.float32)
    batch = {"x": x, "y": np.roll(x, 1, axis=1)}

    for name, (mesh, cut) in layouts.items():
        step = make_train_step(
            lambda: Network(nnx.Rngs(0)), optax.adam(1e-2), squared_error, mesh, rule=cut
        )
        state = step.init()
        for _ in range(args.steps):
            state, loss, _ = step(state, batch)
        print(f"{name}: loss {float(loss):.6f} after {args.steps} steps; {describe_mesh(mesh)}")

    # The last of them beside data parallelism and groups; nothing is allocated for it.
    whole = step.variant(create_mesh(), rule=Rule(replicate=("",)), mode="jit")
    groups = step.variant(create_mesh(data=2), rule=None)
    ways = {"data parallel": whole, "groups": groups, name: step}
    print(f"\n{compare(ways, batch)}")


if __name__ == "__main__":
    main()
