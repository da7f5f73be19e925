# SPDX-License-Identifier: Apache-2.0
"""Forked children, as of a DataLoader, that touch a sharded parameter."""

import os
import select

import torch
from support.limits import PEERS_S
from support.world import on_processes
from torch import nn

from fullshard.torch import fully_shard
from fullshard.torch.comm.process_group import ProcessGroupComm


def in_child(function, timeout_s=PEERS_S):
    """Run ``function`` in a forked child; return as text its answer or error, None if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], timeout_s)
    answer = os.read(reading, 10_000).decode() if ready else None
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reading)
    return answer


@on_processes(2)
def test_a_forked_child_that_would_communicate_is_told(group):
    model = fully_shard(nn.Linear(8, 8), mesh=group)
    weight = model.weight
    for what in (
        weight.full_tensor,
        weight.norm,
        lambda: model(torch.ones(1, 8)),
        lambda: fully_shard(nn.Linear(2, 2), mesh=group),
        lambda: ProcessGroupComm(group),
    ):
        text = in_child(what)
        assert text is not None, f"{what} did not end"
        assert text.startswith("UsageError: process "), text
        assert "was forked from process" in text
        assert "full_tensor()" in text
    assert in_child(model.state_dict).startswith("OrderedDict")  # DTensors, which are there
    assert in_child(lambda: float(weight.detach().mul(0).local.sum())) == "0.0"
    model(torch.ones(1, 8)).sum().backward()  # the parent can go on
