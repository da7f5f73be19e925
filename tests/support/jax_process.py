# SPDX-License-Identifier: Apache-2.0
"""One of several processes of a JAX training; prints its losses and the sum of its parameters."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from support import jax_models as models

from fullshard.jax import (
    create_mesh,
    initialize,
    load_checkpoint,
    make_train_step,
    save_checkpoint,
)


def train(mesh):
    """Numbers of devices and processes, the losses, and the sum of all parameters."""
    step = make_train_step(
        models.make_tree, optax.adam(1e-2), models.tree_error, mesh, at_most_unsharded=0.1
    )
    losses, params, state = models.train_sharded(step, models.vector_batches(3, 12, 12))
    doubled = jax.tree.map(lambda x: 2 * x, state.params)
    np.testing.assert_array_equal(models.held(doubled)["layers.0.w"], 2 * params["layers.0.w"])
    total = float(sum(np.abs(x).sum() for x in params.values()))
    processes = len({device.process_index for device in mesh.devices.flat})
    return [mesh.devices.size, processes, *losses, total]


def save_aside(mesh, run):
    """Save twice aside and load: the step, the number of processes, and what the run then has."""
    rows = jax.NamedSharding(mesh, jax.P("fsdp"))
    values = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    state = {"w": jax.make_array_from_callback((6, 4), rows, values.__getitem__), "step": 3}
    for step in (1, 2):
        save_checkpoint(run, state, step=step, asynchronous=True)
        state["w"] = state["w"] + 1
    loaded = load_checkpoint(run, state)
    mine = [shard.data for shard in loaded.state["w"].addressable_shards]
    held = [values[shard.index] + 1 for shard in loaded.state["w"].addressable_shards]
    assert all(np.array_equal(a, b) for a, b in zip(mine, held, strict=True))
    multihost_utils.sync_global_devices("read")
    return [loaded.step, loaded.world, sorted(each.name for each in Path(run).glob("step-*"))]


def main():
    joined = initialize()
    mesh = create_mesh()
    print("result", json.dumps([joined, *train(mesh), *save_aside(mesh, sys.argv[1])]))


if __name__ == "__main__":
    main()
