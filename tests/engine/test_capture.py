# SPDX-License-Identifier: Apache-2.0
"""`capture_step` names what a CUDA graph cannot hold, and refuses it before anything runs."""

import threading
import weakref

import pytest
import torch
from torch import nn

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import capture_step, fully_shard
from fullshard.torch.comm.watch.watchdog import Watchdog, Witness


def on_two(call):
    def body(comm):
        torch.manual_seed(0)
        call(fully_shard(nn.Linear(4, 4), mesh=comm))

    LocalWorld(2).run(body)


def never():
    raise AssertionError("the step runs")


def test_what_cannot_be_captured_is_named():
    def without_a_gpu(model):
        with pytest.raises(NotSupportedError, match=r"capture this model: .*computes on cpu"):
            capture_step(model, never)

    on_two(without_a_gpu)


def test_a_capture_needs_units_between_steps_and_a_warm_up():
    with pytest.raises(UsageError, match="no sharded unit"):
        capture_step(nn.Linear(4, 4), never)

    def within_a_step(model):
        loss = model(torch.zeros(2, 4)).sum()
        with pytest.raises(UsageError, match="between steps"):
            capture_step(model, never)
        loss.backward()
        with pytest.raises(UsageError, match="warm_up=1, expected 2 or more"):
            capture_step(model, never, warm_up=1)

    on_two(within_a_step)


class Asked:
    """A collective in a capture: CUDA fails who asks for it."""

    def is_completed(self):
        raise AssertionError("the device is asked")


def test_the_watchdog_asks_no_device_while_a_graph_is_captured(monkeypatch):
    watchdog, witness = object.__new__(Watchdog), object.__new__(Witness)
    watchdog.away, watchdog._asking = False, threading.Lock()
    watchdog._witnesses = (weakref.ref(witness),)
    witness.watchdog, witness.timeout_s = watchdog, 0.0
    witness.pending = ("a gather before it", 0.0, [Asked()])
    monkeypatch.setattr(Watchdog, "_current", watchdog)
    with Watchdog.looking_away():
        witness.leaves_pending("a gather", [Asked()])
        assert watchdog._stuck_s() == 0
        assert witness.overdue() is None
    assert watchdog._stuck_s() == 0  # nor for what was captured
    witness.leaves_pending("a gather", [Asked()])
    with pytest.raises(AssertionError, match="the device is asked"):
        watchdog._stuck_s()
