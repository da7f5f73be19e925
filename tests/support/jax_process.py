# SPDX-License-Identifier: Apache-2.0
"""One of several processes of a JAX training; prints its losses and the sum of its parameters."""

import json

import numpy as np
import optax
from support import jax_models as models

from fullshard.jax import create_mesh, initialize, make_train_step


def train(mesh):
    """Numbers of devices and processes, the losses, and the sum of all parameters."""
    step = make_train_step(models.make_tree, optax.adam(1e-2), models.tree_error, mesh)
    losses, params, state = models.train_sharded(step, models.vector_batches(3, 12, 12))
    moved = step.load_arrays(state, ((f"parameters/{name}", 2 * x) for name, x in params.items()))
    doubled = step.gather_array(moved, "parameters/layers.0.w")
    np.testing.assert_array_equal(doubled, 2 * params["layers.0.w"])
    total = float(sum(np.abs(x).sum() for x in params.values()))
    processes = len({device.process_index for device in mesh.devices.flat})
    return [mesh.devices.size, processes, *losses, total]


def main():
    joined = initialize()
    print("result", json.dumps([joined, *train(create_mesh())]))


if __name__ == "__main__":
    main()
