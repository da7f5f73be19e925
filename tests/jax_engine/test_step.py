# SPDX-License-Identifier: Apache-2.0
"""What a compiled step holds, what a state gives and takes, and what is refused."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import jax_models as models

from fullshard.core.errors import ConfigurationError
from fullshard.jax import Rule, create_mesh, make_train_step, threshold

BATCH = next(models.token_batches(1, 48))


@functools.cache
def gpt():
    return models.GPT(nnx.Rngs(0), layers=2)


def step_of(devices=8, **options):
    make = options.pop("make", None) or gpt()
    tx = options.pop("tx", optax.adam(1e-2))
    mesh = options.pop("mesh", None) or create_mesh(fsdp=devices)
    return make_train_step(make, tx, options.pop("loss_fn", models.cross_entropy), mesh, **options)


@functools.cache
def step_on_8():
    return step_of()


def numels(results):
    """The number of elements of each array among the results of collectives."""
    found = [dims.split(",") for each in results for dims in re.findall(r"\[([\d,]*)\]", each)]
    return [int(np.prod([int(dim) for dim in dims if dim])) for dims in found]


def test_one_program_of_gathers_and_reduce_scatters():
    step = step_on_8()
    state = step.init()
    for batch in models.token_batches(10, 48):
        state, *_ = step(state, batch)
    assert step.compilations == 1
    assert int(step.gather_array(state, "step/step")) == 10
    found = models.collectives(step.compiled(BATCH).as_text())
    # A reduce-scatter for each array, of a layer once for all layers, leaves a device its slice.
    slices = sorted(
        int(np.prod(each.rest_shape)) // 8 // (len(each.members) if each.stacked else 1)
        for each in step.placements
    )
    assert sorted(numels(found["reduce-scatter"])) == slices
    # Each is gathered in the forward and, but for what XLA merges, in the backward.
    full = {8 * numel for numel in slices}
    assert set(numels(found["all-gather"])) == full
    assert len(slices) <= len(found["all-gather"]) <= 2 * len(slices)
    assert all(numel == 1 for numel in numels(found["all-reduce"])), found["all-reduce"]
    assert found["all-to-all"] == found["collective-permute"] == []


def test_hybrid_sums_slices_over_data():
    step = step_of(mesh=create_mesh(data=2, fsdp=4))
    found = models.collectives(step.compiled(BATCH).as_text())
    reduced = set(numels(found["reduce-scatter"]))
    assert set(numels(found["all-reduce"])) <= reduced | {1}
    assert len(numels(found["all-reduce"])) >= len(found["reduce-scatter"])


def test_bf16_is_gathered_and_fp32_reduced():
    text = step_of(precision="bfloat16").lowered(BATCH).as_text()
    gathers = re.findall(r'"stablehlo.all_gather".*?-> tensor<[\dx]*x(\w+)>', text)
    assert set(gathers) == {"bf16"}
    reduces = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<[\dx]*x(\w+)>', text, re.DOTALL)
    assert set(reduces) == {"f32"}
    assert len(reduces) == len(step_of().placements)


def test_nothing_is_ever_whole_when_a_model_is_made():
    step = step_of(make=lambda: models.GPT(nnx.Rngs(0), width=64, layers=2))
    shardings = step._arrays.shardings()
    make = jax.jit(step._make, out_shardings=(shardings.params, shardings.other))
    program = make.lower().compile()
    params, _ = program()
    for array in (*params.values(), *step_on_8().init().optimizer.values()):
        if array.ndim:
            local = array.addressable_shards[0].data
            assert local.size * 8 == array.size, array.shape
    memory = program.memory_analysis()
    largest = max(each.numel * 4 for each in step.placements)
    assert (
        memory.output_size_in_bytes + memory.temp_size_in_bytes
        < largest + sum(each.rest_bytes for each in step.placements) * 2
    )


def test_memory_stays_near_what_rests():
    step = step_of(make=lambda: models.GPT(nnx.Rngs(0), width=128, layers=8))
    memory = step.compiled(BATCH).memory_analysis()
    rest = sum(each.rest_bytes for each in step.placements)
    assert memory.argument_size_in_bytes < 3.1 * rest
    assert memory.alias_size_in_bytes > 0.99 * 3 * rest
    whole_layer = 12 * 128 * 128 * 4
    assert memory.temp_size_in_bytes < 1.1 * rest + 5 * whole_layer


def test_a_state_goes_from_8_devices_to_6():
    many, few = step_on_8(), step_of(6)
    state = many.init()
    for batch in models.token_batches(2, 48):
        state, *_ = many(state, batch)
    kinds = ("parameters", "optimizer", "other", "step")
    arrays = dict(many.arrays(state, kinds))
    assert set(arrays) == {spec.key for spec in few.specs}
    assert {spec.key: spec.shape for spec in few.specs} == {k: x.shape for k, x in arrays.items()}
    moved = few.load_arrays(few.init(), arrays.items())
    for key, x in few.arrays(moved, kinds):
        np.testing.assert_array_equal(x, arrays[key], err_msg=key)
    after = [float(step(each, BATCH)[1]) for step, each in ((many, state), (few, moved))]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_what_comes_in_is_checked():
    step = step_of(3)
    state = step.init()
    with pytest.raises(ConfigurationError, match="no array 'parameters/none'"):
        step.load_arrays(state, [("parameters/none", 0)])
    with pytest.raises(ConfigurationError, match=r"norm.scale has shape \(12,\), .* has \(13,\)"):
        step.load_arrays(state, [("parameters/norm.scale", np.zeros(13))])
    with pytest.raises(ConfigurationError, match="parameters did not come, among them 'param"):
        step.load_arrays(state, [])
    with pytest.raises(ConfigurationError, match=r"batch\['x'\] has shape \(4, 4\): 3 devices x"):
        step(state, {"x": BATCH["x"][:4], "y": BATCH["y"][:4]})
    with pytest.raises(ConfigurationError, match=r"'y'\] has shape \(3, 4\), .*'x'\] has 6 rows"):
        step(state, {"x": BATCH["x"][:6], "y": BATCH["y"][:3]})
    with pytest.raises(ConfigurationError, match="batch is a int, expected an array"):
        step(state, 3)
    with pytest.raises(ConfigurationError, match=r"lacks optimizer '0.trace.blocks"):
        step_of(3, tx=optax.sgd(0.1, momentum=0.9))(state, BATCH)
    other = r"params 'blocks.0-1.attention.key.kernel' has shape \(2, 12, 4, 3\), .* \(2, 147\)"
    with pytest.raises(ConfigurationError, match=other):
        step_of(7)(state, {k: x[:42] for k, x in BATCH.items()})
    with pytest.raises(ConfigurationError, match="expected a TrainState, got dict"):
        step({}, BATCH)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"remat": "all"}, "remat='all' is none of 'block', 'matmuls', 'none'"),
        ({"depth": 3}, "unknown option 'depth'; known: remat, scan"),
        ({"accumulate": 0}, "at least 1 micro-batch"),
        ({"precision": "bf16"}, "unknown dtype 'bf16'"),
        ({"rule": Rule(replicate=("no_such",))}, "pattern 'no_such' matches no array"),
        ({"wrt": nnx.BatchStat}, "selects no parameter; paths are like: "),
        ({"mesh": create_mesh(fsdp=4, tensor=2)}, "no rule says what to cut along it"),
        ({"mesh": create_mesh(fsdp=4, tensor=2), "mode": "shard_map"}, "does not cut along"),
        ({"rule": threshold(10**6), "at_most_unsharded": 0.1}, r"100.0% of all bytes would be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_asked_for_is_checked(options, text):
    with pytest.raises(ConfigurationError, match=text):
        step_of(**options)


def test_a_step_describes_itself():
    step = step_of(3)
    lines = step.describe().splitlines()
    row = next(line for line in lines if line.startswith("blocks.0-1.up.kernel"))
    assert row.split()[-1] == f"{2 * 12 * 48 * 4 // 3:,}"
    assert "rows (2, 12, 48) P(None, 'fsdp', None)" in row
    assert lines[-1] == "blocks.0 to blocks.1 are 2 equal layers"
    assert "100.0% of all bytes sharded" in lines[-2]


def test_merged_is_the_model():
    step = step_of(7)
    found = step.merged(step.init())
    assert isinstance(found, models.GPT)
    assert nnx.graphdef(found) == nnx.graphdef(gpt())
    whole, expected = (
        dict(nnx.to_flat_state(nnx.state(each, nnx.Param))) for each in (found, gpt())
    )
    assert whole.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(whole[path][...], leaf[...], err_msg=str(path))
