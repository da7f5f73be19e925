# SPDX-License-Identifier: Apache-2.0
"""A run in bf16 beside PyTorch's: what differs is rounding, and nothing races.

A reference with the same arithmetic (a copy in bf16, gradients summed in fp32 in the order of
ranks, norms in fp64) must agree bit for bit, step by step, which no race would allow.
"""

import pytest
import torch
from support import bf16_workers as workers

STEPS = workers.STEPS


@pytest.mark.parametrize(
    ("world", "clip", "reduced"),
    [(2, 0.0, torch.float32), (3, 0.3, torch.float32), (3, 0.0, torch.bfloat16)],
)
def test_a_run_in_bf16_has_the_bits_of_a_reference(gloo_world, world, clip, reduced):
    for found in gloo_world.run(world, workers.equal_steps, clip, reduced):
        assert found["ours twice"] == STEPS
        assert found["ours and the reference"] == STEPS
        assert found["PyTorch's twice"] == STEPS
        if world == 2 and not clip:  # two numbers have one sum, whatever the order
            assert found["ours and PyTorch's"] == STEPS
        assert found["losses apart"] < 2**-8  # of about 3.4: one digit of bf16
