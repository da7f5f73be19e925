# SPDX-License-Identifier: Apache-2.0
"""Updates by a thread: the last first, what is awaited before it, errors, and forks."""

import os
import threading
from functools import partial

import pytest
import torch
from support.limits import PEERS_S

from fullshard.torch.optim.host_updates import HostUpdates
from fullshard.torch.unit.streams import CopiesUnderWay

CPU = torch.device("cpu")


class Copy:
    """An event that has come, or comes when somebody waits for it."""

    def __init__(self, done=True):
        self.done = done

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


class Blocked:
    """Updates of which the first waits until it may go on."""

    def __init__(self, count, late=()):
        self.updates, self.made, self.begun, self.goes_on = HostUpdates(), [], *events(2)
        self.waits = [self.updates.begin(CopiesUnderWay(CPU, []), self.first)]
        assert self.begun.wait(PEERS_S)
        for i in range(1, count):
            copies = CopiesUnderWay(CPU, [Copy(), Copy(done=i not in late)])
            self.waits.append(self.updates.begin(copies, partial(self.made.append, i)))

    def first(self):
        self.begun.set()
        assert self.goes_on.wait(PEERS_S)
        self.made.append(0)


def events(count):
    return [threading.Event() for _ in range(count)]


def test_the_last_is_made_first():
    blocked = Blocked(5)
    blocked.goes_on.set()
    for wait in blocked.waits:
        wait()
    assert blocked.made == [0, 4, 3, 2, 1]


def test_what_has_not_arrived_comes_after_what_has():
    """And the first of it first, which the thread waits for."""
    blocked = Blocked(7, late=(1, 2, 5, 6))
    blocked.goes_on.set()
    for wait in blocked.waits:
        wait()
    assert blocked.made == [0, 4, 3, 1, 2, 5, 6]


def test_what_somebody_waits_for_comes_next():
    blocked = Blocked(5)
    waiter = threading.Thread(target=blocked.waits[2])
    waiter.start()
    while blocked.updates._awaited is None:
        assert waiter.is_alive()
    blocked.goes_on.set()
    waiter.join(PEERS_S)
    for wait in blocked.waits[:2]:
        wait()
    assert blocked.made == [0, 2, 4, 3, 1]


def test_who_waits_gets_the_error_and_others_are_made():
    updates, made, there = HostUpdates(), [], CopiesUnderWay(CPU, [])

    def fail():
        raise ValueError("no memory")

    failing = updates.begin(there, fail)
    other = updates.begin(there, lambda: made.append(1))
    other()
    with pytest.raises(ValueError, match="no memory"):
        failing()
    assert made == [1]


def test_a_fork_comes_after_all_updates():
    """Its child has no thread, and would wait for them forever."""
    blocked = Blocked(3)
    threading.Timer(0.05, blocked.goes_on.set).start()
    child = os.fork()
    if child == 0:
        for wait in blocked.waits:
            wait()
        os._exit(len(blocked.made))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
