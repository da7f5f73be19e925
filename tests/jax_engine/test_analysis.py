# SPDX-License-Identifier: Apache-2.0
"""What analyses say of a step, against its layout and against other ways to count."""

import os
import subprocess

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import item_bytes
from fullshard.jax import (
    Rule,
    communication,
    compare,
    create_mesh,
    make_train_step,
    memory_analysis,
    profile,
    which_needs_less,
)
from fullshard.jax.collectives import communication_of, instructions

BATCH = {name: jax.ShapeDtypeStruct((48, 4), np.int32) for name in "xy"}


def tree_step(**options):
    """A small step without units: quick to compile."""
    mesh = options.pop("mesh", None) or create_mesh(fsdp=8)
    tx = optax.adam(1e-2)
    return make_train_step(models.make_tree, tx, models.tree_error, mesh, **options)


VECTORS = next(models.vector_batches(1, 48, 12))


@pytest.fixture(scope="module")
def step():
    make = lambda: models.GPT(nnx.Rngs(0), layers=4)  # noqa: E731
    return make_train_step(make, optax.adam(1e-2), models.cross_entropy, create_mesh(fsdp=8))


def padded_numel(placement):
    """Elements at rest of one member, padding included."""
    return int(np.prod(placement.rest_shape)) // len(placement.members)


# ---- communication -------------------------------------------------------------------------------


def test_communication_is_that_of_the_layout(step):
    found = communication(step, BATCH)
    resting = [(each, 4 * len(each.members) * padded_numel(each)) for each in step.placements]
    once = sum(7 * size // 8 for _, size in resting)
    # Each array's gradient is reduced once, layer by layer.
    reduced = found.of("reduce-scatter")
    assert sum(each.sent_bytes for each in reduced) == once
    layers = sorted(len(each.members) for each, _ in resting)
    assert sorted(each.count for each in reduced) == layers
    # Layers are gathered in forward and in backward, where only biases that nothing is made of are
    # not; what is not scanned once or twice.
    gathered = found.of("all-gather")
    stacked = sum(7 * size // 8 for each, size in resting if each.stacked)
    of_layers = sum(each.sent_bytes for each in gathered if each.count == 4)
    assert 1.98 * stacked < of_layers <= 2 * stacked
    assert once - stacked <= sum(each.sent_bytes for each in gathered) - of_layers
    assert sum(each.sent_bytes for each in gathered) <= 2 * once
    # The loss is all that is summed whole.
    assert [each.arrays for each in found.of("all-reduce")] == [(("f32", 1),)]
    assert not found.of("all-to-all") + found.of("collective-permute")
    assert found.sent_bytes == found.asked_bytes
    assert str(found).splitlines()[-1].startswith("together ")


def test_the_dtype_asked_for_is_told_apart():
    found = communication(tree_step(precision="bfloat16"), VECTORS)
    assert {each.asked_dtype for each in found.of("all-gather")} == {"bf16"}
    assert {each.asked_dtype for each in found.of("reduce-scatter")} == {"f32"}
    gathered = found.of("all-gather")
    assert {dtype for each in gathered for dtype, _ in each.arrays} == {"f32"}  # as on all CPUs
    assert sum(each.sent_bytes for each in gathered) == 2 * sum(e.asked_bytes for e in gathered)
    assert "f32, asked for bf16" in str(found)


PROGRAM = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[3,16])) -> (s32[], f32[3,16]) {
  %ag = (bf16[4]{0}, bf16[16]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  %done = bf16[16]{0} all-gather-done(%ag)
  ROOT %t = (s32[], f32[3,16]) tuple(%i, %p)
}

%never (p: f32[8]) -> f32[8] {
  ROOT %ar.9 = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.1 = (s32[], f32[3,16]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
  %rs = f32[2,3]{1,0} reduce-scatter(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %both = (f32[5]{0}, /*index=1*/bf16[7]{0}) all-reduce(%p, %q), replica_groups={}, to_apply=%add
  %grid = f32[6]{0} all-to-all(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}
  %half = f32[6]{0} all-to-all(%p), replica_groups=@mesh_0[a=2,b=4] {a, b:(1)2}, dimensions={0}
  ROOT %cp = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
"""


def test_reading_a_program():
    found = {each.name: each for each in communication_of(PROGRAM, 8).collectives}
    assert {
        name: (each.kind, each.arrays, each.group, each.count) for name, each in found.items()
    } == {
        "ag": ("all-gather", (("bf16", 16),), 4, 3),
        "rs": ("reduce-scatter", (("f32", 12),), 2, 1),
        "both": ("all-reduce", (("f32", 5), ("bf16", 7)), 8, 1),
        "grid": ("all-to-all", (("f32", 6),), 4, 1),
        "half": ("all-to-all", (("f32", 6),), 4, 1),
        "cp": ("collective-permute", (("f32", 8),), 8, 1),
    }
    sent = {name: each.sent_bytes for name, each in found.items()}
    assert sent == {
        "ag": 3 * 32 * 3 // 4,
        "rs": 48 // 2,
        "both": 2 * (20 + 14) * 7 // 8,
        "grid": 24 * 3 // 4,
        "half": 24 * 3 // 4,
        "cp": 32,
    }
    assert [each.count for each in instructions(PROGRAM) if each.kind == "while"] == [1]


# ---- memory --------------------------------------------------------------------------------------


def test_memory_with_and_without_sharding(step):
    found = memory_analysis(step, BATCH)
    sharded, whole = found["sharded"], found["unsharded"]
    memory = step.compiled(BATCH).memory_analysis()
    assert sharded.temporary_bytes == memory.temp_size_in_bytes
    batch = 2 * 48 * 4 * 4 // 8
    assert sharded.state_bytes == memory.argument_size_in_bytes - batch
    numel = sum(each.numel for each in step.placements)
    counts, keys = 8, 4 * 12  # adam's and the step's; of dropout in each layer
    assert whole.state_bytes == 3 * 4 * numel + counts + keys
    assert sharded.state_bytes < whole.state_bytes / 7.5
    assert sharded.peak_bytes < whole.peak_bytes / 2
    # Of data parallel an all-reduce of all gradients and of the loss: 2(N-1)/N.
    assert whole.sent_bytes == pytest.approx(2 * 7 / 8 * 4 * (numel + 1), rel=1e-3)
    assert 1.3 < sharded.sent_bytes / whole.sent_bytes < 1.52
    assert not sharded.estimate
    assert found.least is sharded
    assert str(found).splitlines()[2].split()[:2] == ["sharded", "8"]
    with pytest.raises(KeyError, match="there are sharded, unsharded"):
        found["other"]


def test_other_counts_of_devices_are_compiled_elsewhere():
    small, large = tree_step(mesh=create_mesh(fsdp=2)), tree_step(mesh=create_mesh(fsdp=6))
    assert memory_analysis(small, VECTORS, devices=6) == memory_analysis(large, VECTORS)


def test_a_failure_elsewhere_is_told(monkeypatch):
    run = subprocess.run

    def without_jax(*args, **kwargs):
        return run(*args, **{**kwargs, "env": {**os.environ, "JAX_PLATFORMS": "none"}})

    monkeypatch.setattr(subprocess, "run", without_jax)
    with pytest.raises(ConfigurationError, match=r"for 4 simulated devices: .*none"):
        memory_analysis(tree_step(mesh=create_mesh(fsdp=2)), VECTORS, devices=4)


def test_devices_must_divide():
    step = tree_step(mesh=create_mesh(data=2, fsdp=2))
    with pytest.raises(ConfigurationError, match="devices=7 is no multiple of data x tensor = 2"):
        memory_analysis(step, VECTORS, devices=7)


# ---- ways to run the same step -------------------------------------------------------------------


def test_which_mode_needs_less():
    found = which_needs_less(tree_step(), VECTORS)
    assert {row.name for row in found.rows} == {"shard_map", "compiler"}
    assert found["shard_map"].communication.of("reduce-scatter")
    assert not found["compiler"].communication.of("reduce-scatter")
    assert found["shard_map"].state_bytes == found["compiler"].state_bytes
    assert found.least.peak_bytes == min(row.peak_bytes for row in found.rows)


def test_compare_lays_the_model_out_in_other_ways():
    mesh = create_mesh(fsdp=4, tensor=2)
    rule = Rule(tensor={r"layers\.0\.w": 0, r"layers\.1\.w": 1})
    step = tree_step(mesh=mesh, rule=rule, at_most_unsharded=1.0)
    found = compare(step, VECTORS)
    names = [row.name for row in found.rows]
    assert names == ["data parallel", "FSDP over 8", "hybrid, 2 x 4", "as it is"]
    state = {row.name: row.state_bytes for row in found.rows}
    expected = {
        "FSDP over 8": sum(3 * each.rest_bytes for each in tree_step().placements) + 8,
        "data parallel": sum(3 * item_bytes(p.dtype) * p.numel for p in step.placements) + 8,
    }
    assert {name: state[name] for name in expected} == expected
    assert state["FSDP over 8"] < state["hybrid, 2 x 4"] < state["data parallel"]
    groups = {each.group for each in found["hybrid, 2 x 4"].communication.of("all-gather")}
    assert groups == {4}
    with pytest.raises(ConfigurationError, match="nothing to choose from"):
        which_needs_less(step, VECTORS)


def test_a_variant_keeps_what_its_step_found():
    with pytest.raises(ConfigurationError, match="scan cannot change"):
        tree_step().variant(scan=True)


# ---- profile -------------------------------------------------------------------------------------


def test_profile_has_the_shares_of_collectives():
    step = tree_step()
    state, found = profile(step, step.init(), VECTORS, steps=2)
    assert int(state.step) == 3
    assert {"all-gather", "reduce-scatter", "computation"} <= set(found.by_kind)
    assert all(0 < seconds < found.step_s for seconds in found.by_kind.values())
    assert 0 < found.collectives_share < 1
    assert str(found).splitlines()[-1].startswith("the step")
