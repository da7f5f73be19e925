# SPDX-License-Identifier: Apache-2.0
"""Kill ranks before and after every file system operation of a save, and look what is left.

A program of its own, that forks: ``python checkpoint_crashes.py FOLDER [every-n-th]``. Prints JSON:
how many crashes there were, what they left, and every rule that was broken.
"""

import collections
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.checkpoint_cases import FaultyFiles, arrays, assert_holds, spans_of

from fullshard.checkpoint import Keep, steps_in
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.ranks import SoloRanks
from fullshard.checkpoint.runs.folder import LOCK
from fullshard.checkpoint.saving import save

WORLD = 2
TIMEOUT_S = 20.0  # of the ranks; no rank may live longer than a few of these
PATIENCE_S = 75.0


class SocketRanks:
    """Ranks that are processes, each with a socket to rank 0. ``watch(what)`` sees every call."""

    def __init__(self, rank, sockets, watch=lambda what: None):
        self.rank, self.size, self.sockets, self.watch = rank, WORLD, sockets, watch
        for each in sockets:
            each.settimeout(TIMEOUT_S)

    def gather(self, data):
        self.watch("gather")
        if self.rank == 0:
            return [data, *(self._receive(each) for each in self.sockets)]
        self._send(self.sockets[0], data)
        return []

    def broadcast(self, data):
        self.watch("broadcast")
        if self.rank == 0:
            for each in self.sockets:
                self._send(each, data)
            return data
        return self._receive(self.sockets[0])

    def share(self, data):
        return json.loads(
            self.broadcast(json.dumps([d.decode() for d in self.gather(data)]).encode())
        )

    def _send(self, to, data):
        to.sendall(len(data).to_bytes(8, "little") + data)

    def _receive(self, source):
        size = int.from_bytes(self._exactly(source, 8), "little")
        return self._exactly(source, size)

    def _exactly(self, source, count):
        data = b""
        while len(data) < count:
            part = source.recv(count - len(data))
            if not part:
                raise ConnectionError("a rank has gone")
            data += part
        return data


def save_on_processes(run, step, watch_of):
    """Save ``step`` on forked ranks; how each ended, and how long the slowest took.

    ``watch_of(rank)`` gives what is called with each operation: (its kind, its number, done).
    """
    pair = socket.socketpair()
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                os.setpgid(0, pids[0] if pids else 0)
            pair[1 - rank].close()
            os._exit(_one_rank(run, step, rank, pair[rank], watch_of(rank)))
        pids.append(pid)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pids[0])
    for each in pair:
        each.close()
    return _wait_for(pids)


def _one_rank(run, step, rank, to_peer, watch):
    calls = iter(range(10**6))

    @contextlib.contextmanager
    def around(op, number, path):
        watch(op, number, False)
        yield
        watch(op, number, True)

    def collective(what):
        watch(what, next(calls), False)

    os.close(2)
    try:
        ranks = SocketRanks(rank, [to_peer], collective)
        pieces = spans_of(arrays(step), rank, WORLD)
        save(run, pieces, About(step), ranks, FaultyFiles(around), Keep(last=1))
    except Exception:
        return 1
    return 0


def _wait_for(pids):
    begin = time.monotonic()
    ends = {}
    for pid in pids:
        descriptor = os.pidfd_open(pid)
        left = max(0.0, PATIENCE_S - (time.monotonic() - begin))
        if not select.select([descriptor], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            ends[pid] = "hung"
        os.close(descriptor)
        status = os.waitpid(pid, 0)[1]
        ends.setdefault(pid, os.waitstatus_to_exitcode(status))
    return list(ends.values()), time.monotonic() - begin


def operations(run):
    """What each rank does to the file system and with its peer in a save, in order."""
    counts = []
    for rank in range(WORLD):
        read, write = os.pipe()

        def watch_of(each, rank=rank, write=write):
            def watch(op, number, done):
                if each == rank and not done:
                    os.write(write, f"{op} {number}\n".encode())

            return watch

        ends, _ = save_on_processes(run, 1, watch_of)
        assert ends == [0, 0], ends
        os.close(write)
        with os.fdopen(read) as lines:
            counts.append([(line.split()[0], int(line.split()[1])) for line in lines])
        shutil.rmtree(run)
    return counts


def crash(run, victim, place, after, everybody):
    """One save in which ``victim`` dies at ``place``; with ``everybody`` all ranks do."""

    def watch_of(rank):
        def watch(op, number, done):
            if rank == victim and (op, number) == place and done == after:
                if everybody:
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

        return watch

    return save_on_processes(run, 2, watch_of)


def broken_rules(run, ends, seconds):
    """What does not hold after a crash in the save of step 2."""
    if "hung" in ends:
        yield f"a rank hung: {ends}"
    if seconds > 3 * TIMEOUT_S:
        yield f"it took {seconds:.1f} s"
    steps = [each.step for each in steps_in(Files(), run)]
    if steps not in ([1], [1, 2], [2]):
        yield f"steps {steps}"
        return
    if 0 in ends and 2 not in steps:
        yield f"ranks ended with {ends} and there are steps {steps}"
    assert_holds(run, arrays(steps[-1]))
    save(run, spans_of(arrays(3), 0, 1), About(3), SoloRanks())
    assert_holds(run, arrays(3))
    left = [each.name for each in run.iterdir() if each.name.startswith(".") and each.name != LOCK]
    if left:
        yield f"left over after the next save: {left}"


def main(folder, every=1):
    root = Path(folder)
    before = root / "before"
    counts = operations(root / "count")
    ends, _ = save_on_processes(before, 1, lambda rank: lambda *_: None)
    assert ends == [0, 0]
    cases = [
        (rank, place, after, everybody)
        for rank in range(WORLD)
        for place in counts[rank]
        for after in (False, True)
        for everybody in (False, True)
        if not (after and place[0] in ("gather", "broadcast"))
    ]
    report = {"cases": 0, "left": collections.Counter(), "broken": [], "slowest_s": 0.0}
    for number, case in enumerate(cases):
        if number % every:
            continue
        run = root / f"case-{number}"
        shutil.copytree(before, run)
        ends, seconds = crash(run, *case)
        report["cases"] += 1
        steps = [each.step for each in steps_in(Files(), run)]
        report["left"]["new step" if 2 in steps else "old step"] += 1
        report["slowest_s"] = max(report["slowest_s"], round(seconds, 2))
        report["broken"] += [f"{case}: {rule}" for rule in broken_rules(run, ends, seconds)]
        shutil.rmtree(run)
    report["operations"] = [len(each) for each in counts]
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
