# SPDX-License-Identifier: Apache-2.0
"""Order on a simulated device: timelines, their vector clocks, and memory that remembers its uses.

A timeline is the host or a stream. What runs on one is ordered; between two there is only the order
that events, waits and launches make. An access that is not ordered after what it depends on is a
race, whichever way it would have gone in one run: so one run stands for every interleaving of the
streams. What remains open are the host's questions ("is it completed?"), whose answers are given by
``answer``.

[Note: Freed memory]
The allocator gives freed memory at once to who asks next on the stream on which it was allocated,
and trusts that stream's order. So every access must be ordered before that stream's position at the
time of reuse. Any request that fits counts as reuse, as the allocator cuts large blocks.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import reduce

from numpy import maximum

HOST = "host"
UPDATES = "updates"  # the host's second thread: see `device.updates`
THREADS = HOST, UPDATES
COMPUTE = "compute"
TIME = "seconds"  # within clocks: when, by the cost model


@dataclass(frozen=True)
class Costs:
    """How fast a device is: a kernel takes what its work or its bytes take, whichever is longer.

    Of links there may be several, as an array: times then are arrays, too.
    """

    flops_per_s: float = 550e12
    memory_bytes_per_s: float = 2.6e12
    link_bytes_per_s: float = 100e9
    host_bytes_per_s: float = 50e9  # between the host and the device, each way
    update_bytes_per_s: float = float("inf")  # of what the host itself computes
    kernel_s: float = 2e-6

    def kernel(self, size, flops):
        return max(self.kernel_s, size / self.memory_bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Launch:
    timeline: str
    what: str
    size: int  # bytes read and written, or sent
    flops: int = 0
    crosses: bool = False  # between the host and the device


@dataclass
class Access:
    timeline: str
    tick: int
    begin: int
    end: int
    write: bool
    what: str
    where: str = ""

    def __str__(self):
        kind = "written" if self.write else "read"
        return f"{kind} by {self.what} on {self.timeline}{self.where and ' in ' + self.where}"


@dataclass
class Memory:
    """The memory behind one storage, from one allocation to its end."""

    size: int
    home: str  # the stream on which it was allocated, or the host
    label: str
    pinned: bool = False
    known: bool = False  # was there before the simulation looked: it has been written
    gone: bool = False
    weights: bool = False  # what an optimizer writes to: each write makes a new version
    accesses: list[Access] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    versions: list[tuple[int, int, int]] = field(default_factory=list)  # begin, end, version
    numbers: list = field(default_factory=list)  # that it was filled with, to be compared by ranks

    def version(self, span, choose=max):
        """The version of the weights of which bytes ``span`` were made, or 0."""
        begin, end = span
        return choose((v for b, e, v in self.versions if b < end and begin < e), default=0)

    def put_version(self, span, version):
        begin, end = span
        kept = [(b, min(e, begin), v) for b, e, v in self.versions if b < begin]
        kept += [(max(b, end), e, v) for b, e, v in self.versions if e > end]
        self.versions = [*kept, (begin, end, version)]


class Held:
    """Bytes of the device that are allocated, by the stream whose memory they are."""

    def __init__(self):
        self.bytes = Counter()
        self.watch()

    def watch(self):
        """Look for peaks from now on."""
        self.peak_bytes = self.total_bytes
        self.peaks = Counter(self.bytes)

    @property
    def total_bytes(self):
        return sum(self.bytes.values())

    @property
    def reserved_bytes(self):
        """The bytes that the allocator reserves: no stream gets what another one has freed."""
        return sum(self.peaks.values())

    def change(self, home, size):
        self.bytes[home] += size
        self.peaks[home] = max(self.peaks[home], self.bytes[home])
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)


class Machine:
    """One rank's device and host. ``findings`` are what it did wrong, ``syncs`` host waits."""

    def __init__(self, answer=lambda: False, costs=None, *, completes_at_once=False):
        self.answer = answer
        self.completes_at_once = completes_at_once
        self.costs = costs or Costs()
        self.clocks = {HOST: {HOST: 0}, COMPUTE: {COMPUTE: 0}}
        self.current = COMPUTE
        self.host = HOST  # the thread that runs
        self.findings = {}  # by text, for their order
        self.syncs = Counter()
        self.collectives = []
        self.answers = []  # of other ranks to what the host asks next: (label, values)
        self.label = ""  # what the engine calls the collective that it issues next
        self.high_priority = {}  # by the name of the group
        self.launches = []
        self._wire_free = 0.0
        self.questions = 0
        self.running = False
        self._freed = []
        self.held = Held()
        self._directions = {}  # of the copies on each stream
        self.rest_bytes = 0  # what a step has left behind
        self._version = 0

    # ---- order ----------------------------------------------------------------------------------

    def clock(self, timeline):
        return self.clocks.setdefault(timeline, {timeline: 0})

    def step(self, timeline):
        """Let the next thing happen on a timeline; on a stream behind its launch by the host."""
        clock = self.clock(timeline)
        if timeline not in THREADS:
            _join(clock, self.clock(self.host))
        clock[timeline] += 1
        return clock[timeline]

    def position(self, timeline):
        """Return the position that an event recorded now stands for."""
        return dict(self.clock(timeline))

    def put_behind(self, timeline, position):
        _join(self.clock(timeline), position)

    def sync(self, position, what):
        """The host waits."""
        self.put_behind(self.host, position)
        self.step(self.host)
        if self.running and self.host == HOST:
            self.syncs[f"{what} in {where()}"] += 1

    def ask(self, position):
        """The host asks whether something has come so far; if so, it knows from now on."""
        if "watchdog.py" in where():  # on which no step depends
            return False
        self.questions += 1
        done = _has_seen(self.clocks[HOST], position) or self.answer()
        if done:
            self.put_behind(HOST, position)
        return done

    # ---- time -----------------------------------------------------------------------------------

    def launch(self, timeline, what, size, flops=0, *, crosses=False):
        """Let the step just made take time on its timeline, whatever others do meanwhile."""
        self.launches.append(Launch(timeline, what, size, flops, crosses))
        if timeline in THREADS:
            took_s = size / self.costs.update_bytes_per_s
        else:
            bus_s = size / 2 / self.costs.host_bytes_per_s if crosses else 0.0
            took_s = max(bus_s, self.costs.kernel(size, flops))
        clock = self.clock(timeline)
        clock[TIME] = clock.get(TIME, 0.0) + took_s

    def send(self, timeline, what, size, ranks):
        """A collective of ``size`` bytes takes time: behind all that this rank sends already."""
        self.launches.append(Launch(timeline, what, size))
        if timeline != HOST:
            clock = self.clock(timeline)
            begin = maximum(clock.get(TIME, 0.0), self._wire_free)
            took_s = size * (ranks - 1) / ranks / self.costs.link_bytes_per_s
            self._wire_free = clock[TIME] = begin + self.costs.kernel_s + took_s

    @property
    def now_s(self):
        """When all that was launched is done."""
        return reduce(maximum, (clock.get(TIME, 0.0) for clock in self.clocks.values()))

    # ---- memory ---------------------------------------------------------------------------------

    def allocate(self, size, home, label, *, pinned=False):
        if home != HOST:
            self._check_reuse(size, home, label)
            self.held.change(home, size)
        memory = Memory(size, home, label, pinned)
        if home != HOST:
            # Another stream must come after those who had it before, as the home stream does.
            tick = self.step(home)
            memory.accesses.append(Access(home, tick, 0, size, True, "its former owner"))
        return memory

    def free(self, memory):
        memory.gone = True
        if memory.home != HOST and memory.size:
            self._freed.append(memory)
            if not memory.known:
                self.held.change(memory.home, -memory.size)

    def _check_reuse(self, size, home, label):
        clock = dict(self.clock(home))
        _join(clock, self.clocks[HOST])
        fitting = [m for m in self._freed if m.home == home and m.size >= size]
        for memory in fitting:
            memory.accesses = [a for a in memory.accesses if clock.get(a.timeline, 0) < a.tick]
            for access in memory.accesses:
                self.find(f"memory of {memory.label} is given to {label}, still {access}")
        if fitting:
            self._freed.remove(min(fitting, key=lambda m: m.size))

    def touch(self, memory, span, write, timeline, what, *, again=False):
        """An access of bytes ``span`` by what has just been stepped on ``timeline``.

        What is written ``again`` is as good as it was: what nobody has written stays so.
        """
        begin, end = span
        if begin == end:
            return
        if memory.gone or end > memory.size:
            self.find(f"{what} on {timeline} touches {memory.label} after it was freed")
            return
        clock = self.clocks[timeline]
        kept = []
        for access in memory.accesses:
            ordered = clock.get(access.timeline, 0) >= access.tick
            apart = access.end <= begin or end <= access.begin
            if not apart and not ordered and (write or access.write):
                kind = "writes" if write else "reads"
                self.find(f"{what} on {timeline} {kind} {memory.label}, unordered: {access}")
            covered = begin <= access.begin and access.end <= end and ordered
            if not covered or (access.write and not write and access.timeline != timeline):
                kept.append(access)
        memory.accesses = kept
        if again:
            pass
        elif write:
            _cover(memory.written, begin, end)
        elif not memory.known and not _is_covered(memory.written, begin, end):
            self.find(f"{what} on {timeline} reads {memory.label}, which nobody has written")
        tick = clock[timeline]
        memory.accesses.append(Access(timeline, tick, begin, end, write, what))

    def derive(self, read, written):
        """What is ``written`` (memory, span) is made of what was ``read``."""
        version = max((memory.version(span) for memory, span in read), default=0)
        for memory, span in written:
            if memory.weights:
                self._version += 1
            made = self._version if memory.weights else version
            if made or memory.versions:
                memory.put_version(span, made)

    def cross(self, timeline, to_host):
        """A copy between the host and the device: one way on each stream of copies."""
        if (
            timeline not in (HOST, COMPUTE)
            and self._directions.setdefault(timeline, to_host) != to_host
        ):
            self.find(f"copies wait for those the other way on {timeline}")

    def find(self, text):
        if self.running:
            self.findings.setdefault(f"{text} [{where()}]", None)


def where():
    """The innermost lines of the engine that run now."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        if "/fullshard/torch/" in path or "/_fully_shard/" in path:
            lines.append(f"{path.rsplit('/', 1)[-1]}:{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "the program"


def _join(clock, other):
    for timeline, tick in other.items():
        if timeline == TIME:
            clock[TIME] = maximum(tick, clock.get(TIME, 0.0))
        elif tick > clock.get(timeline, 0):
            clock[timeline] = tick


def _has_seen(clock, position):
    ticks = (each for each in position.items() if each[0] != TIME)
    return all(clock.get(timeline, 0) >= tick for timeline, tick in ticks)


def _cover(spans, begin, end):
    apart = [s for s in spans if s[1] < begin or end < s[0]]
    met = [s for s in spans if not (s[1] < begin or end < s[0])]
    spans[:] = [*apart, (min([begin, *(s[0] for s in met)]), max([end, *(s[1] for s in met)]))]


def _is_covered(spans, begin, end):
    return any(s[0] <= begin and end <= s[1] for s in spans)
