# SPDX-License-Identifier: Apache-2.0
"""Meshes, rules, and arrays placed in their own shapes."""

import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.jax import (
    Rule,
    batch_sharding,
    create_mesh,
    describe,
    global_batch,
    initialize,
    make_train_step,
    selective,
    shard,
    shardings,
)
from fullshard.jax.mesh import read_mesh
from fullshard.jax.rule import coverage, place

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)


def axes_of(**sizes):
    return read_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes)))


@given(shapes, st.integers(1, 9))
def test_the_largest_dimension_that_divides_is_cut(shape, shards):
    (placement,) = place([ParamSpec("w", shape)], axes_of(fsdp=shards))
    dividing = [size for size in shape if size and size % shards == 0]
    if not dividing:
        assert not placement.sharded
        assert placement.reason
        assert placement.rest_bytes == 4 * math.prod(shape)
        return
    (dim,) = [dim for dim, axis in enumerate(placement.axes) if axis == "fsdp"]
    stacked = len(shape) == 3 and shape[0] == max(dividing)
    assert shape[dim] == max(dividing) or (stacked and dim > 0)
    assert dim > 0 or len(shape) < 3 or dividing == [shape[0]]  # layers may be stacked there
    assert placement.rest_bytes * shards == 4 * math.prod(shape)


def test_rules():
    specs = [ParamSpec("embed", (100, 8)), ParamSpec("norm", (8,)), ParamSpec("head", (8, 4))]
    axes = axes_of(fsdp=4, tensor=2)

    def sharded(rule):
        found = place(specs, axes, rule)
        return [each.name for each in found if each.sharded], coverage(found)

    assert sharded(None) == (["embed", "norm", "head"], 1.0)
    assert sharded(selective(24)) == (["embed", "head"], 832 / 840)
    assert sharded(Rule(only=("embed",)))[0] == ["embed"]
    assert sharded(Rule(replicate=("^h",)))[0] == ["embed", "norm"]
    with pytest.raises(ConfigurationError, match=r"'nrm' matches no array; paths are like embed"):
        sharded(Rule(replicate=("nrm",)))
    with pytest.raises(ConfigurationError, match=r"names dimension 2 of 'head', .* \(8, 4\)"):
        sharded(Rule(tensor={"head": 2}))
    found = place(specs, axes, Rule(tensor={"embed": 0}, dims={"head": 1}))
    assert [each.axes for each in found] == [("tensor", "fsdp"), ("fsdp",), (None, "fsdp")]
    assert [each.shards for each in found] == [8, 4, 4]


def test_what_variables_say_of_axes_is_kept():
    specs = [ParamSpec("w", (8, 16)), ParamSpec("v", (8, 16)), ParamSpec("u", (6, 16))]
    names = {"w": ("embed", "mlp"), "v": (("tensor", "fsdp"), None), "u": (None, "tensor")}
    rule = Rule(logical={"mlp": "tensor", "embed": None})
    found = place(specs, axes_of(fsdp=4, tensor=2), rule, names)
    expected = [("fsdp", "tensor"), (("tensor", "fsdp"), None), (None, "tensor")]
    assert [each.axes for each in found] == expected  # 4 does not divide 6
    with pytest.raises(ConfigurationError, match="translates 'mlp' to 'model', which is no axis"):
        place(specs, axes_of(fsdp=4), Rule(logical={"mlp": "model"}), names)
    with pytest.raises(ConfigurationError, match="tensor=4 does not divide dimension 0 of 'u'"):
        place(specs[2:], axes_of(fsdp=2, tensor=4), None, {"u": ("tensor", None)})


def test_annotated_models_train_as_they_say():
    def make():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        return nnx.Linear(8, 6, kernel_init=init, rngs=nnx.Rngs(0))

    mesh = create_mesh(fsdp=4, tensor=2)
    step = make_train_step(
        make, optax.sgd(0.1), models.squared_error, mesh, rule=Rule(logical={"a": None})
    )
    assert step.placements[1].axes == ("fsdp", "tensor")
    x = np.ones((8, 8), np.float32)
    state, _, _ = step(step.init(), {"x": x, "y": x[:, :6]})
    assert state.params["kernel"].sharding.spec == jax.P("fsdp", "tensor")


def test_a_tree_of_shapes_has_shardings():
    shapes = jax.eval_shape(lambda: models.make_tree())
    found = shardings(shapes, create_mesh(fsdp=4))
    assert found["layers"][0]["w"].spec == jax.P("fsdp", None)
    assert found["layers"][0]["b"].is_fully_replicated  # 7 elements
    assert found["scale"].is_fully_replicated
    of_module = shardings(nnx.eval_shape(lambda: models.GPT(nnx.Rngs(0), layers=1)), create_mesh())
    leaves = jax.tree.leaves(of_module)
    assert any("fsdp" in each.spec for each in leaves)


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


def test_jit_over_arrays_in_their_own_shapes():
    """Seed 003's own form: a module sharded in place, an nnx optimizer, `jit`."""
    mesh = create_mesh(fsdp=4)
    model = models.GPT(nnx.Rngs(0), layers=2)
    alone = nnx.clone(model)
    with pytest.raises(ConfigurationError, match=r"100.0% of all bytes .*\n  blocks.0.down.kernel"):
        shard(model, create_mesh(fsdp=7))
    shard(model, mesh)
    assert model.blocks[1].up.kernel[...].sharding.spec == jax.P(None, "fsdp")
    assert "P(None, 'fsdp')" in describe(model)
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def train_step(optimizer, batch):
        loss, grads = nnx.value_and_grad(models.cross_entropy)(optimizer.model, batch)
        optimizer.update(grads)
        return loss

    batch = next(models.token_batches(1, 16))
    expected, _ = models.train_alone(alone, optax.sgd(0.1), models.cross_entropy, [batch])
    found = train_step(optimizer, jax.device_put(batch, batch_sharding(mesh, 0)))
    np.testing.assert_allclose(found, expected[0], rtol=1e-5)


def test_trees_are_placed():
    mesh = create_mesh(fsdp=4)
    tree = {"w": np.arange(32.0, dtype=np.float32).reshape(4, 8), "name": "kept"}
    placed = shard(tree, mesh)
    assert placed["name"] == "kept"
    assert placed["w"].addressable_shards[0].data.shape == (4, 2)
    np.testing.assert_array_equal(placed["w"], tree["w"])
    assert describe(placed).endswith("together 32 B per device")


def test_batches_of_processes_are_joined():
    mesh = create_mesh(data=2)
    assert batch_sharding(mesh).spec == jax.P(("data", "fsdp"))
    joined = global_batch(mesh, {"x": np.arange(16), "lr": np.float32(1.0)})
    assert joined["x"].addressable_shards[0].data.shape == (2,)
    assert joined["lr"].sharding.is_fully_replicated
