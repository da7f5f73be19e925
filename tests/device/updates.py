# SPDX-License-Identifier: Apache-2.0
"""The thread that updates what rests on the host, on a simulated machine."""

from functools import partial

from device.machine import HOST, TIME, UPDATES


class Updates:
    """`fullshard.torch.optim.host_updates.HostUpdates`, as a timeline of its own.

    Which update the thread makes when it is free is found out when the host waits for one.
    """

    def __init__(self, machine):
        self._machine = machine
        self._waiting = []
        self._made = {}  # the clock when an update was there

    def begin(self, copies, make):
        number = len(self._made)
        self._made[number] = None
        self._waiting.append((number, self._machine.position(HOST), copies, make))
        self._machine.step(HOST)
        return partial(self._await, number)

    def _await(self, number):
        since_s = _when(self._machine.position(HOST))
        while self._made[number] is None:
            free_s = _when(self._machine.position(UPDATES))
            given = [each for each in self._waiting if _when(each[1]) <= free_s] or self._waiting[
                :1
            ]
            there = [each for each in given if _arrives(each[2]) <= free_s]
            awaited = [each for each in there if each[0] == number and free_s >= since_s]
            self._make((awaited or there[-1:] or given)[0])
        self._machine.put_behind(HOST, self._made[number])

    def _make(self, update):
        machine = self._machine
        self._waiting.remove(update)
        number, given, copies, make = update
        machine.put_behind(UPDATES, given)
        machine.host = UPDATES
        try:
            for event in copies.events:
                event.synchronize()
            make()
        finally:
            machine.host = HOST
            self._made[number] = machine.position(UPDATES)


def _when(clock):
    return clock.get(TIME, 0.0)


def _arrives(copies):
    return max((_when(event.position) for event in copies.events), default=0.0)
