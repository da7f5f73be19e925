# SPDX-License-Identifier: Apache-2.0
"""Updates by a thread: the last first, what is awaited before it, errors, and forks."""

import os
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from support.limits import PEERS_S, PROCESS_S

from fullshard.torch.optim.host_updates import HostUpdates
from fullshard.torch.unit.streams import CopiesUnderWay

CPU = torch.device("cpu")


class Copy:
    """An event."""

    def __init__(self, done=True):
        self.done = done

    def query(self):
        if self.done is None:
            raise RuntimeError("an illegal memory access was encountered")
        return self.done


def until(condition):
    ends = time.monotonic() + PEERS_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(1e-3)


class Blocked:
    """Updates of which the first waits until it may go on."""

    def __init__(self, count, late=()):
        self.updates, self.made, self.begun, self.goes_on = HostUpdates(), [], *events(2)
        self.waits = [self.updates.begin(CopiesUnderWay(CPU, []), self.first)]
        assert self.begun.wait(PEERS_S)
        self.late = [Copy(done=False) for _ in late]
        there = dict(zip(late, self.late, strict=True))
        for i in range(1, count):
            copies = CopiesUnderWay(CPU, [Copy(), there.get(i, Copy())])
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
    until(lambda: blocked.made == [0, 4, 3])
    for copy in reversed(blocked.late):  # the thread sleeps until the first of them is done
        copy.done = True
    for wait in blocked.waits:
        wait()
    assert blocked.made == [0, 4, 3, 1, 6, 5, 2]


def test_what_somebody_waits_for_comes_next():
    blocked = Blocked(5)
    waiter = threading.Thread(target=blocked.waits[2])
    waiter.start()
    until(lambda: blocked.updates._awaited is not None)
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


def test_an_error_of_the_device_is_told_and_holds_nobody_up():
    updates, made = HostUpdates(), []
    failing = updates.begin(CopiesUnderWay(CPU, [Copy(done=None)]), partial(made.append, 0))
    good = updates.begin(CopiesUnderWay(CPU, []), partial(made.append, 1))
    good()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failing()
    assert made == [1]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_without_a_thread_it_is_made_at_once_or_not_at_all(error, monkeypatch):
    updates, made, there = HostUpdates(), [], CopiesUnderWay(CPU, [])

    def submit(_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(updates._executor, "submit", submit)
        if isinstance(error, RuntimeError):
            updates.begin(there, partial(made.append, 0))()
        else:
            with pytest.raises(KeyboardInterrupt):
                updates.begin(there, partial(made.append, 0))
    updates.begin(there, partial(made.append, 1))()
    assert made == ([0, 1] if isinstance(error, RuntimeError) else [1])


ENDS = """
import atexit

import torch
from fullshard.torch.optim import host_updates
from fullshard.torch.unit.streams import CopiesUnderWay

class Never:
    def query(self):
        return False

def wait_at_last(wait):
    try:
        wait()
    except TimeoutError as error:
        print(error)

host_updates._AT_EXIT_S = 0.01
copies = CopiesUnderWay(torch.device("cpu"), [Never()])
wait = host_updates.HostUpdates().begin(copies, lambda: None)
atexit.register(wait_at_last, wait)
"""


def test_a_program_that_ends_does_not_wait_for_ever():
    """For gradients of a rank that is gone: the interpreter joins the thread before it exits."""
    command = [sys.executable, "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=True)
    assert "gradients do not arrive" in done.stdout


# Of Python from 3.12 on, and of JAX where another test has loaded it.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_fork_comes_after_all_updates():
    """Its child has no thread, and would wait for them forever."""
    blocked = Blocked(3)
    threading.Timer(0.05, blocked.goes_on.set).start()
    child = os.fork()
    if child == 0:
        try:
            for wait in blocked.waits:
                wait()
        finally:
            os._exit(len(blocked.made))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
