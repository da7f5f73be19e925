# SPDX-License-Identifier: Apache-2.0
"""What analyses say of a step, against its layout and against other ways to count."""

import functools
import re

import optax
import pytest
from support import jax_models as models

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.jax import (
    Rule,
    communication,
    compare,
    create_mesh,
    make_train_step,
    memory_analysis,
    overlap_flags,
)
from fullshard.jax.analysis import traffic_of

VECTORS = next(models.vector_batches(1, 48, 12))


def tree_step(**options):
    """A small step: quick to compile."""
    mesh = options.pop("mesh", None) or create_mesh(fsdp=4)
    tx = optax.adam(1e-2)
    return make_train_step(models.make_tree, tx, models.tree_error, mesh, **options)


@functools.cache
def step_on_4():
    return tree_step()


# ---- communication -------------------------------------------------------------------------------


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
  %turned = f32[6]{0} all-to-all(%p), replica_groups=mesh['a'=4,'b'=2], \
device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}
  %half = f32[6]{0} all-to-all(%p), replica_groups=@mesh_0[a=2,b=4] {a, b:(1)2}, dimensions={0}
  ROOT %cp = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
}
"""


def test_reading_a_program():
    found = {each.name: each for each in traffic_of(PROGRAM, 8).collectives}
    assert {
        name: (each.kind, each.arrays, each.group, each.count) for name, each in found.items()
    } == {
        "ag": ("all-gather", (("bf16", 16),), 4, 3),
        "rs": ("reduce-scatter", (("f32", 12),), 2, 1),
        "both": ("all-reduce", (("f32", 5), ("bf16", 7)), 8, 1),
        "grid": ("all-to-all", (("f32", 6),), 4, 1),
        "turned": ("all-to-all", (("f32", 6),), 2, 1),
        "half": ("all-to-all", (("f32", 6),), 4, 1),
        "cp": ("collective-permute", (("f32", 8),), 8, 1),
    }
    sent = {name: each.sent_bytes for name, each in found.items()}
    assert sent == {
        "ag": 3 * 32 * 3 // 4,
        "rs": 48 // 2,
        "both": 2 * (20 + 14) * 7 // 8,
        "grid": 24 * 3 // 4,
        "turned": 24 // 2,
        "half": 24 * 3 // 4,
        "cp": 32,
    }


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "%rs = f32[2,3]{1,0} reduce-scatter(",
            "%rs := f32[2,3] reduce-scatter(",
            "mentions 8 collectives, of which 7",
        ),
        ("ENTRY %main (p: f32[8]) -> f32[8] {", "entry main {", "its entry is 'not found'"),
        ("replica_groups=[2,4]<=[8]", "replica_groups=V3(2,4)", "in an unknown notation: 'V3"),
        ("f32[6]{0} all-to-all", "strange[6]{0} all-to-all", "dtype of unknown size .* 'strange'"),
    ],
)
def test_another_form_of_program_is_an_error(before, after, message):
    assert before in PROGRAM
    with pytest.raises(NotSupportedError, match=message):
        _ = traffic_of(PROGRAM.replace(before, after), 8).sent_bytes


def test_the_installed_xla_writes_programs_that_are_read():
    """Every collective that this version's text mentions, in all notations it uses."""
    step = tree_step(mesh=create_mesh(data=2, fsdp=4))
    found = communication(step, VECTORS)
    assert {each.group for each in found.collectives} >= {4}
    text = step.compiled(VECTORS).as_text()
    names = set(re.findall(r"%((?:all|reduce|collective)-[a-z]+[.\d]*) = ", text))
    kinds = ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]
    told = {each.name for each in found.collectives}
    assert {name for name in names if name.split(".")[0] in kinds} <= told


# ---- memory --------------------------------------------------------------------------------------


def test_memory_with_and_without_sharding():
    step = step_on_4()
    found = memory_analysis(step, VECTORS)
    sharded, whole = found["sharded"], found["unsharded"]
    memory = step.compiled(VECTORS).memory_analysis()
    assert sharded.temporary_bytes == memory.temp_size_in_bytes
    batch = 2 * 48 * 12 * 4 // 4
    assert sharded.state_bytes == memory.argument_size_in_bytes - batch
    numel = sum(each.spec.numel for each in step.placements)
    assert whole.state_bytes == 3 * 4 * numel + 8  # counts of adam and of the step
    assert sharded.state_bytes < whole.state_bytes / 3.5
    # Of data parallel an all-reduce of all gradients and of the loss: 2(N-1)/N.
    assert whole.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * (numel + 1), rel=0.02)
    assert str(found).splitlines()[2].split()[:2] == ["sharded", "4"]


# ---- ways to run the same step -------------------------------------------------------------------


def test_ways_to_run_a_step_are_compared():
    step = step_on_4()
    whole_batch = step.variant(batch_axes=("data",))
    modes = compare({"activations": whole_batch, "jit": step.variant(mode="jit")}, VECTORS)
    assert len({row.state_bytes for row in modes.values()}) == 1
    mesh = create_mesh(fsdp=4, tensor=2)
    ways = {
        "cut twice": step.variant(mesh, rule=Rule(tensor={r"layers\.0\.w": 0, r"layers\.1\.w": 1})),
        "hybrid": step.variant(create_mesh(data=2), rule=None),
        "whole": step.variant(create_mesh(), rule=Rule(replicate=("",))),
    }
    found = compare(ways, VECTORS)
    assert list(found) == list(ways)
    assert found["cut twice"].state_bytes < found["whole"].state_bytes
    assert found["hybrid"].state_bytes < found["whole"].state_bytes
    groups = {each.group for each in found["hybrid"].communication.of("all-gather")}
    assert groups == {4}


def test_a_variant_keeps_what_its_step_found():
    with pytest.raises(ConfigurationError, match="wrt cannot change"):
        tree_step().variant(wrt=None)


# ---- flags ---------------------------------------------------------------------------------------


def test_flags_for_overlap_are_told():
    assert overlap_flags("cpu") == ""
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in overlap_flags("gpu").split()
    with pytest.raises(ConfigurationError, match="'npu' is none of gpu, tpu, cpu"):
        overlap_flags("npu")
