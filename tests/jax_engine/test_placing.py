# SPDX-License-Identifier: Apache-2.0
"""Meshes, rules, and arrays placed in their own shapes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax import create_mesh, describe, gather, initialize, replicate, selective, shard
from fullshard.jax.placement import Form, Rule, coverage, place, place_dims

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@given(shapes, st.integers(1, 9), st.integers(0, 3))
def test_any_shape_rests_on_any_number_of_devices(shape, shards, layers):
    members = [ParamSpec(f"blocks.{n}.w", shape) for n in range(layers or 1)]
    (found,) = place([members if layers else tuple(members)], {"fsdp": shards})
    assert len(found.rest_shape) == len(found.axes)
    if math.prod(shape) == 0:
        assert found.form is Form.REPLICATED
        return
    dim = found.axes.index("fsdp")
    assert dim == int(bool(layers))
    assert found.rest_shape[dim] % shards == 0
    assert 0 <= found.padding_numel < shards * len(members)
    assert found.rest_bytes * shards == 4 * math.prod(found.rest_shape)
    assert found.name == (f"blocks.0-{layers - 1}.w" if layers > 1 else "blocks.0.w")


def test_rules():
    specs = [ParamSpec("embed", (100, 8)), ParamSpec("norm", (8,)), ParamSpec("head", (8, 3))]

    def sharded(rule):
        found = place([(spec,) for spec in specs], {"fsdp": 4}, rule)
        return [each.name for each in found if "fsdp" in each.axes], coverage(found)

    assert sharded(None) == (["embed", "norm", "head"], 1.0)
    assert sharded(selective(24)) == (["embed", "head"], 824 / 832)
    assert sharded(Rule(only=("embed",)))[0] == ["embed"]
    assert sharded(Rule(replicate=("^h",)))[0] == ["embed", "norm"]
    with pytest.raises(ConfigurationError, match=r"'nrm' matches no array; paths are like embed"):
        sharded(Rule(replicate=("nrm",)))
    with pytest.raises(ConfigurationError, match=r"names dimension 2 of 'head', .* \(8, 3\)"):
        place_dims(specs, {"fsdp": 4, "tensor": 2}, Rule(tensor={"head": 2}))
    found = place_dims(specs, {"fsdp": 4, "tensor": 2}, Rule(tensor={"embed": 0}))
    assert found[0].axes == ("tensor", "fsdp")


def test_a_mesh_has_three_axes_of_type_auto():
    mesh = create_mesh(data=2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert create_mesh(fsdp=5).devices.size == 5


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"fsdp": 9}, r"data=1 x fsdp=9 x tensor=1 needs 9 devices, there are 8 device\(s\) \(cpu"),
        ({"data": 3}, "data=3 x tensor=1 does not divide 8"),
        ({"tensor": 0}, "mesh axis 'tensor' needs at least 1"),
    ],
)
def test_a_mesh_that_cannot_be(sizes, text):
    with pytest.raises(ConfigurationError, match=text):
        create_mesh(**sizes)


def test_without_a_launcher_nothing_is_joined(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert initialize() is False
    with pytest.raises(ConfigurationError, match="together"):
        initialize("localhost:1")


def test_jit_over_arrays_in_their_own_shapes():
    """Seed 003's own form: a module sharded in place, an nnx optimizer, `jit`."""
    mesh = create_mesh(fsdp=4)
    model = models.GPT(nnx.Rngs(0), layers=2)
    alone = nnx.clone(model)
    with pytest.raises(ConfigurationError, match=r"100.0% of all bytes .*\n  blocks.0.down.kernel"):
        shard(model, create_mesh(fsdp=7))
    shard(model, mesh, at_most_unsharded=0.1)
    assert model.blocks[1].up.kernel[...].sharding.spec == jax.P("fsdp", None)
    assert "P('fsdp', None)" in describe(model)
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train_step(optimizer, batch):
        loss, grads = nnx.value_and_grad(models.cross_entropy)(optimizer.model, batch)
        optimizer.update(grads)
        return loss

    batch = next(models.token_batches(1, 16))
    expected, _ = models.train_alone(alone, optax.sgd(0.1), models.cross_entropy, [batch])
    found = train_step(optimizer, replicate(jax.tree.map(jnp.asarray, batch), mesh))
    np.testing.assert_allclose(found, expected[0], rtol=1e-5)


def test_trees_are_placed_and_gathered():
    mesh = create_mesh(fsdp=4)
    tree = {"w": np.arange(32.0, dtype=np.float32).reshape(4, 8), "name": "kept"}
    placed = shard(tree, mesh)
    assert placed["name"] == "kept"
    assert placed["w"].addressable_shards[0].data.shape == (1, 8)
    np.testing.assert_array_equal(gather(placed)["w"], tree["w"])
    assert replicate(placed, mesh)["w"].sharding.is_fully_replicated
    assert describe(placed).endswith("together 32 B per device")
