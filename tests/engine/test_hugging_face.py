# SPDX-License-Identifier: Apache-2.0
"""Models of the transformers library train sharded as in one process."""

import itertools
from functools import cache

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from safetensors.torch import load_file
from support.hugging_face import (
    CASES,
    LEARNING_RATE,
    STEPS,
    generate,
    generate_sharded,
    initialised_from_meta,
    initialised_from_meta_on_ranks,
    make,
    saved,
    train_plain,
    train_sharded,
    with_adapters,
)
from support.rounding import rounding, rounding_by_adam
from support.sampling import pairwise
from support.training import mean_losses
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.t5.modeling_t5 import T5Block, T5Stack

from fullshard.testing import LocalWorld

plain = cache(train_plain)


def compare(name, runs):
    whole, inside = plain(name, len(runs)), CASES[name].inside
    check_figures(mean_losses(runs), whole.losses, inside)
    assert runs[0].params.keys() == whole.params.keys()
    for run in runs:
        check_figures(run.norms, whole.norms, inside)
        for key, expected in whole.params.items():
            atol = rounding_by_adam(STEPS, expected.numel(), LEARNING_RATE)
            atol = 1e-9 if inside is torch.float64 else atol
            torch.testing.assert_close(run.params[key], expected, rtol=0, atol=atol)


def check_figures(found, expected, dtype):
    for updates, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert mine == pytest.approx(other, abs=1e-9, rel=rounding(updates, dtype, dtype))


DOORS = ("wrapper", "function")


@pytest.mark.parametrize(("name", "door", "world"), pairwise([*CASES], DOORS, (2, 3)))
def test_three_steps_equal_one_process(name, door, world):
    compare(name, LocalWorld(world).run(lambda comm: train_sharded(comm, name, door)))


@pytest.mark.parametrize(("door", "name"), [*zip(itertools.cycle(DOORS), CASES)])
def test_shard_grad_op(name, door):
    how = {"door": door, "strategy": "SHARD_GRAD_OP"}
    compare(name, LocalWorld(2).run(lambda comm: train_sharded(comm, name, **how)))


@pytest.mark.parametrize(
    ("name", "door", "checkpointing"), pairwise([*CASES], DOORS, ("reentrant", "not reentrant"))
)
def test_gradient_checkpointing_as_the_library_does_it(name, door, checkpointing):
    how = {"door": door, "checkpointing": checkpointing}
    compare(name, LocalWorld(2).run(lambda comm: train_sharded(comm, name, **how)))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "units"),
    [("gpt2", {GPT2Block, nn.Embedding, nn.Linear}), ("t5", {T5Block, T5Stack, nn.Linear})],
    ids=["gpt2", "t5"],
)
def test_weights_that_are_tied_across_units(name, units, door):
    """The embedding and the head are units of their own that share a weight."""
    how = {"door": door, "units": units}
    compare(name, LocalWorld(3).run(lambda comm: train_sharded(comm, name, **how)))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_gloo_processes(gloo_world, name):
    compare(name, gloo_world.run(2, train_sharded, name, "wrapper"))


@pytest.mark.parametrize(
    ("name", "door", "registered"),
    [
        ("gpt2", "wrapper", True),
        ("llama", "function", True),
        ("t5", "wrapper", True),
        ("t5", "function", True),
        ("gpt2", "function", False),
    ],
)
def test_generate_with_ranks_that_end_apart(gloo_world, name, door, registered):
    """All processes of the default group, over which the library's ``synced_gpus`` votes.

    Where the library calls the root itself the function needs no registration; a wrapper does, and
    so does T5, of which it calls the encoder first.
    """
    found = gloo_world.run(4, generate_sharded, name, door, registered)
    plain = make(name).eval()
    assert found == [generate(plain, rank) for rank in range(4)]


@pytest.mark.parametrize("name", CASES)
def test_initialisation_after_sharding_on_meta(gloo_world, name):
    """Bit by bit, which needs the library to take sharded classes for its own models."""
    params, buffers = initialised_from_meta(name)
    for found in gloo_world.run(2, initialised_from_meta_on_ranks, name):
        for got, expected in zip(found, (params, buffers), strict=True):
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied, and not tied
def test_save_pretrained_writes_what_the_plain_model_does(gloo_world, tmp_path, name):
    plain = make(name)
    plain.save_pretrained(tmp_path / "plain", max_shard_size="5KB")
    results = gloo_world.run(2, saved, name, tmp_path)
    check_refusals([texts for texts, _ in results])
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) > 5
    assert [found for _, found in results] == [files, files]
    for file in files:
        assert (tmp_path / "bare" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    for folder in ("bare", "own"):
        loaded = type(plain).from_pretrained(tmp_path / folder, dtype=torch.float64).state_dict()
        assert loaded.keys() == plain.state_dict().keys()
        for key, value in plain.state_dict().items():
            assert torch.equal(loaded[key], value), key


def test_save_pretrained_writes_adapters(gloo_world, tmp_path):
    plain = with_adapters(make("gpt2"), "gpt2")
    plain.save_pretrained(tmp_path / "plain")
    check_refusals([texts for texts, _ in gloo_world.run(2, saved, "gpt2", tmp_path, True)])
    expected = load_file(tmp_path / "plain" / "adapter_model.safetensors")
    for folder in ("bare", "own"):
        found = load_file(tmp_path / folder / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def check_refusals(texts):
    (alone, on_first), (on_second,) = texts
    assert "rank 0 calls save_pretrained(), which all of ranks [0, 1] must call" in alone
    assert "could not save the model: [Errno" in on_first
    assert on_second == "could not save the model: the error is on another rank"
