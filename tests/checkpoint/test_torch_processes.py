# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on ranks that are processes."""

import pytest
import torch
from support import checkpoint_workers as workers

from fullshard.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("kind", "asynchronous", "saving", "loading"),
    [("wrapper", True, 3, 2), ("function", True, 4, 3), ("function", False, 2, 4)],
)
def test_saved_and_loaded_over_process_groups(
    gloo_world, tmp_path, kind, asynchronous, saving, loading
):
    saved = gloo_world.run(saving, workers.save_on, str(tmp_path), kind, asynchronous)[0]
    loaded = gloo_world.run(loading, workers.load_on, str(tmp_path), "wrapper")[0]
    assert saved.keys() == {name.replace("_fsdp_wrapped_module.", "") for name in loaded}
    for name, value in loaded.items():
        assert torch.equal(value, saved[name.replace("_fsdp_wrapped_module.", "")]), name


def test_a_rank_that_calls_alone_is_told(gloo_world, tmp_path):
    told = gloo_world.run(2, workers.alone, str(tmp_path))[1]
    assert "rank 1 calls save_checkpoint()" in told
    assert (tmp_path / "step-000000000002").is_dir()


def test_dtensors_in_plain_modules(gloo_world, tmp_path):
    saved = gloo_world.run(4, workers.columns, str(tmp_path), True)
    loaded = gloo_world.run(4, workers.columns, str(tmp_path), False)
    assert all(torch.equal(each, saved[0]) for each in loaded)


@pytest.mark.parametrize("align", ["element", "row"])
def test_tensors_that_are_cut_along_two_axes_have_rules(gloo_world, tmp_path, align):
    saved = gloo_world.run(4, workers.cut_twice, str(tmp_path), align)[0]
    checkpoint = open_checkpoint(tmp_path)
    tensors = checkpoint.manifest.tensors
    assert {name.partition("/")[0] for name, t in tensors.items() if not t.tiling} == {"random"}
    assert len(tensors["model/0.weight"].tiling.slicings) == 2
    for name, value in saved.items():
        assert checkpoint.read(f"model/{name}").tobytes() == value.numpy().tobytes()
    checkpoint.verify()
