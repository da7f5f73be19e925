# SPDX-License-Identifier: Apache-2.0
"""Interleavings of the timelines of one run, carried out one by one on memory with addresses.

A second look at what `device.machine` finds, which shares none of its clocks. A run is recorded as
tasks, each on its timeline behind the one before it, behind the host that launched it, and behind
what it was told to wait for. Nothing else orders them: a schedule lets any timeline go on whose
next task may. Memory has addresses from an allocator that gives away at random whatever was freed
on the same stream; a task reads right if each byte was last written by the task that wrote it in
the order of the program.

[Note: One run for all]
Two interleavings of the same tasks differ by exchanges of neighbours that no path orders. If no two
of these touch the same bytes, one of them writing, no exchange changes what anybody reads: all
interleavings are one class, and partial-order reduction explores just one of them. `conflicts`
looks for such pairs. The tasks themselves are the same in every interleaving as long as the host
decides nothing by what the device has done: it asks nothing (`Machine.questions`), and what it
waits for is a task. The allocator's choices follow the host's order alone: only ``record_stream``,
which nobody calls, and running out of memory would let it look at the device.
"""

import random
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field, replace

from device.machine import HOST, Machine

_ROUNDED_BYTES = 512
_BURSTS = (1, 2, 5, 20, 1_000_000)  # tasks that a timeline runs while others wait


class _Position(dict):
    """A position, and the task that was the last one on its timeline."""

    task = None


@dataclass
class Task:
    timeline: str
    what: str
    behind: list[int]
    accesses: list[tuple[int, int, int, bool]] = field(default_factory=list)


class Recorder(Machine):
    """A machine that also keeps the tasks, and what was allocated and freed when."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tasks = []
        self.allocations = []  # (number of the memory, its stream or None at its end, bytes)
        self._last = {}
        self._memories = {}

    def _add(self, timeline, what, *behind):
        before = (self._last.get(timeline), self._last.get(HOST), *behind)
        self._last[timeline] = len(self.tasks)
        self.tasks.append(Task(timeline, what, sorted(set(before) - {None})))

    def step(self, timeline):
        self._add(timeline, "step")
        return super().step(timeline)

    def position(self, timeline):
        position = _Position(super().position(timeline))
        position.task = self._last.get(timeline)
        return position

    def put_behind(self, timeline, position):
        self._add(timeline, "wait", getattr(position, "task", None))
        super().put_behind(timeline, position)

    def allocate(self, size, home, label, *, pinned=False):
        memory = super().allocate(size, home, label, pinned=pinned)
        self._number(memory)
        return memory

    def free(self, memory):
        self.allocations.append((self._number(memory), None, 0))
        super().free(memory)

    def _number(self, memory):
        if id(memory) not in self._memories:
            self._memories[id(memory)] = len(self._memories), memory
            home = memory.home if not memory.known else HOST
            self.allocations.append((self._memories[id(memory)][0], home, memory.size))
        return self._memories[id(memory)][0]

    def touch(self, memory, span, write, timeline, what, *, again=False):
        if span[0] < span[1] and not memory.gone:
            task = self.tasks[self._last[timeline]]
            task.what = what
            task.accesses.append((self._number(memory), *span, write))
            if again:
                task.accesses.append((self._number(memory), *span, False))
        super().touch(memory, span, write, timeline, what, again=again)


def placed(allocations, seed):
    """Where each memory lies: behind the others on the host, reused at random on a stream."""
    coin = random.Random(seed)
    addresses, sizes, homes, end = {}, {}, {}, 0
    free = defaultdict(list)  # (address, bytes) by stream
    for number, home, size in allocations:
        if home is None:
            home = homes.pop(number, HOST)
            if home != HOST:
                free[home] = _merged([*free[home], (addresses[number], sizes[number])])
            continue
        size = -(-size // _ROUNDED_BYTES) * _ROUNDED_BYTES
        fitting = [block for block in free[home] if block[1] >= size > 0]
        if fitting and home != HOST:
            block = coin.choice(fitting)
            free[home].remove(block)
            if block[1] > size:
                free[home].append((block[0] + size, block[1] - size))
            addresses[number] = block[0]
        else:
            addresses[number], end = end, end + size
        sizes[number], homes[number] = size, home
    return addresses


def _merged(blocks):
    merged = []
    for address, size in sorted(blocks):
        if merged and sum(merged[-1]) == address:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((address, size))
    return merged


def contracted(tasks):
    """``tasks`` without those that touch nothing, with the same order among the others."""
    kept, behind, places = [], [], {}
    for number, task in enumerate(tasks):
        needs = sorted({each for before in task.behind for each in behind[before]})
        behind.append(needs)
        if task.accesses:
            places[number] = len(kept)
            kept.append(replace(task, behind=[places[each] for each in needs]))
            behind[number] = [number]
    return kept


class Trace:
    """The tasks of a run over cells: runs of bytes that no access takes apart."""

    def __init__(self, recorder, seed=0):
        self.tasks = contracted(recorder.tasks)
        addresses = placed(recorder.allocations, seed)
        spans = [
            [
                (addresses[n] + begin, addresses[n] + end, write)
                for n, begin, end, write in t.accesses
            ]
            for t in self.tasks
        ]
        bounds = sorted({bound for each in spans for span in each for bound in span[:2]})
        last, self.reads, self.writes = {}, [], []
        for number, each in enumerate(spans):
            cells = [(bisect_left(bounds, b), bisect_left(bounds, e), w) for b, e, w in each]
            read = {c for begin, end, write in cells if not write for c in range(begin, end)}
            written = {c for begin, end, write in cells if write for c in range(begin, end)}
            self.reads.append([(cell, last.get(cell, -1)) for cell in sorted(read)])
            self.writes.append(sorted(written))
            last.update(dict.fromkeys(written, number))
        self.cells = len(bounds)
        self.queues = defaultdict(list)
        for number, task in enumerate(self.tasks):
            self.queues[task.timeline].append(number)

    def conflicts(self):
        """Pairs of tasks that touch the same bytes, one of them writing, with no path between."""
        before, written, read = [], {}, defaultdict(list)
        for task in self.tasks:
            mask = 0
            for each in task.behind:
                mask |= before[each] | 1 << each
            before.append(mask)
        found = set()
        for number in range(len(self.tasks)):
            earlier = {written[cell] for cell, _ in self.reads[number] if cell in written}
            for cell in self.writes[number]:
                earlier.update(read.pop(cell, ()))
                if cell in written:
                    earlier.add(written[cell])
            found |= {(each, number) for each in earlier if not before[number] >> each & 1}
            for cell, _ in self.reads[number]:
                read[cell].append(number)
            for cell in self.writes[number]:
                written[cell] = number
        return sorted((a, b) for a, b in found if a != b)

    def wrong_reads(self, seed):
        """Carry out one schedule; returns the first task that reads what it should not, or None."""
        coin = random.Random(seed)
        queues = list(self.queues.values())
        places, done, contents = [0] * len(queues), bytearray(len(self.tasks)), [-1] * self.cells
        behind, reads, writes = [task.behind for task in self.tasks], self.reads, self.writes
        not_ended = list(range(len(queues)))
        while not_ended:
            # One timeline goes on for a while, or as far as it may, and others lag behind.
            chosen = not_ended[int(coin.random() * len(not_ended))]
            queue, place = queues[chosen], places[chosen]
            end = min(len(queue), place + _BURSTS[int(coin.random() * len(_BURSTS))])
            while place < end:
                number = queue[place]
                if not all(map(done.__getitem__, behind[number])):
                    break
                for cell, expected in reads[number]:
                    if contents[cell] != expected:
                        return number
                for cell in writes[number]:
                    contents[cell] = number
                done[number] = 1
                place += 1
            places[chosen] = place
            if place == len(queue):
                not_ended.remove(chosen)
        return None

    def count(self, most=2_000_000):
        """How many interleavings there are, and cuts through the run that they pass.

        None, None beyond so many cuts. A cut is how far each timeline has come.
        """
        queues = list(self.queues.values())
        where = {n: (q, p) for q, queue in enumerate(queues) for p, n in enumerate(queue)}
        ends = tuple(len(queue) for queue in queues)
        ways, cuts = {(0,) * len(queues): 1}, 0
        for _ in self.tasks:
            following = defaultdict(int)
            for cut, times in ways.items():
                for q, place in enumerate(cut):
                    if place == ends[q]:
                        continue
                    needs = (where[each] for each in self.tasks[queues[q][place]].behind)
                    if all(cut[other] > at for other, at in needs):
                        following[(*cut[:q], place + 1, *cut[q + 1 :])] += times
            cuts += len(ways)
            if cuts > most:
                return None, None
            ways = following
        return sum(ways.values()), cuts + 1
