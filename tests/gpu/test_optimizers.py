# SPDX-License-Identifier: Apache-2.0
"""Steps on runs of spans, and beside backward and forward, with numbers on the device."""

from functools import partial

import pytest
import torch
from gpu.training import build, full_parameters, shard
from support.models import loss_of, make_batches

from fullshard.testing import LocalWorld
from fullshard.torch import CPUOffloadPolicy
from fullshard.torch.optim import overlap_optimizer
from fullshard.torch.optim.merged_step import MergedStep


class Apart(torch.optim.AdamW):
    """It has a step of its own: nobody knows what that does, so it steps on each parameter."""

    def step(self, closure=None):
        return super().step(closure)


FORMS = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad, fused": {"fused": True, "amsgrad": True},
    "capturable": {"foreach": True, "capturable": True},
}


def train(comm, device, kind, form, options, beside):
    model = shard(build(device), comm, **options)
    optimizer = kind(model.parameters(), lr=0.01, **form)
    if beside is not None:
        overlap_optimizer(model, optimizer, beside=beside)
    for inputs, targets in make_batches("gpt", 4, 2):
        loss_of(model(inputs.to(device)), targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = MergedStep.of(optimizer)
    assert (merged is None) == (kind is Apart)
    assert merged is None or merged._plans
    return full_parameters(model)


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_steps_on_each_parameter(form, offloaded, device):
    if form == "capturable" and (offloaded or device.type == "cpu"):
        pytest.skip("torch captures steps on a GPU only")
    options = {"offload_policy": CPUOffloadPolicy()} if offloaded else {}
    # On a CPU the ends of spans are rounded as the rest of a loop, if they are stepped as such.
    tolerance = 0 if device.type == "cuda" and not offloaded else 1e-9
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    def body(comm):
        expected = train(comm, device, Apart, FORMS[form], options, None)
        for beside in (None, "backward", "forward"):
            found = train(comm, device, torch.optim.AdamW, FORMS[form], options, beside)
            for name, value in expected.items():
                close(found[name], value, msg=lambda text, of=(name, beside): f"{of}: {text}")

    LocalWorld(2).run(body)
