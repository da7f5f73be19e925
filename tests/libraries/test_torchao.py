# SPDX-License-Identifier: Apache-2.0
"""torchao's optimizers with state in 8 bits step as over FSDP2."""

from importlib.util import find_spec

import pytest
import torch
from support import torchao_workers as workers

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def test_8_bit_adamw_steps_as_over_fsdp2(gloo_world):
    for theirs, ours in gloo_world.run_joined(2, workers.both, None):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
        assert ours[0][-1] < ours[0][0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-6)
        assert ours[2] == theirs[2]
        assert {"OptimState8bit", "Tensor"} == set(ours[2])


def test_state_in_blocks_is_loaded_by_torch_distributed_checkpoint(gloo_world, tmp_path):
    for went_on, resumed in gloo_world.run_joined(2, workers.loaded, None, str(tmp_path)):
        assert resumed == went_on


def test_state_in_blocks_needs_rows(gloo_world):
    for text in gloo_world.run_joined(2, workers.refusal, None):
        assert "sharded by element" in text
