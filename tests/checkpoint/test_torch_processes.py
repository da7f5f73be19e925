# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on ranks that are processes."""

import pytest
import torch
from support import checkpoint_workers as workers


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
