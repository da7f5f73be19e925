# SPDX-License-Identifier: Apache-2.0
"""The lines of docs/checkpoints.md that use Orbax on a state, as they stand there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fullshard.jax import create_mesh, make_train_step

pytest.importorskip("orbax.checkpoint")
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_the_page_saves_and_restores_a_state_by_orbax(tmp_path):
    def make(devices):
        tree = {"w": jnp.arange(24.0).reshape(8, 3)}
        loss = lambda model, batch: model["w"].sum()  # noqa: E731
        return make_train_step(tree, optax.adam(0.1), loss, create_mesh(fsdp=devices))

    [block] = [b for b in re.findall(r"```\n(.*?)```", PAGE.read_text(), re.S) if "orbax" in b]
    one, other = make(4), make(2)
    names = {"folder": tmp_path / "orbax", "state": one.init(), "step": other}
    before = jax.tree.leaves(names["state"])
    exec(block, names)
    for a, b in zip(before, jax.tree.leaves(names["state"]), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert b.sharding.num_devices in (1, 2)
