# SPDX-License-Identifier: Apache-2.0
"""The watchdog: ranks tell the store what they are doing, so that a failure can name them all.

The engine notes what it issues and waits for, by assigning a tuple. A daemon thread, one for each
process, writes that to the default store about once a second and looks whether another rank has
failed. What cannot be told (no store, a store that is gone) makes messages shorter, nothing else.
"""

import atexit
import contextlib
import json
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fullshard.core.errors import CommunicationError
from fullshard.torch.comm.watch.forks import forked, refuse_inherited_world, this_process
from fullshard.torch.comm.watch.parting import PARTED, CallLog, deadlock, parting, wake
from fullshard.torch.comm.watch.store import STORE_TIMEOUT, connect_to_server_of, own_store
from fullshard.torch.comm.watch.table import STORE_ENDED, lines_of, way_out

PERIOD_S = 1.0
RANKS_A_SECOND = 4096  # may write to the store: in larger worlds each of them does so more rarely
RECORDS_READ = 64  # of other ranks, by one that fails; more would be all by all
SILENT_PERIODS = 3  # a rank that has not written for so long has died or hangs as a whole
FAREWELL_S = 1.2 * PERIOD_S  # a failed rank stays that long, as the store may end with its process
STUCK_S = PERIOD_S / 2  # in one call, before a rank asks if the others are in the same
PEERS_ASKED = 4  # at a time; a rank that has parted differs from nearly all others

_Event = tuple[str, float]  # what, and when by this host's clock (seconds since 1970)


@dataclass
class Progress:
    """The present activity of this process; any thread may read it, as fields are set whole."""

    issued: _Event | None = None
    waiting: tuple[str, float, str] | None = None  # the process group is the third
    calling: _Event | None = None
    finished: _Event | None = None
    failed: _Event | None = None


_progress = Progress()


class Standing(NamedTuple):
    """Roll calls completed and collectives issued since, in a family whose ranks do the same."""

    rolls: int = 0
    issued: int = 0


_AT_FIRST = Standing()


class Witness:
    """Notes what one communicator does, and explains it when that fails.

    ``members`` are its ranks in the world; communicators of one ``family`` (a group and those
    derived from it) fail together. Ranks call the same in ``group`` in the same order.
    """

    def __init__(
        self,
        family: str,
        members: Sequence[int],
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
    ):
        refuse_inherited_world("a communicator")
        self._pid = this_process.pid
        self.family = family
        self.members: tuple[int, ...] = tuple(members)
        self.timeout_s = timeout_s
        self.group = group
        self._rank = dist.get_rank()
        self.pending: tuple[str, float, Sequence[Any]] | None = None
        self.watchdog: Watchdog | None = (
            Watchdog.of_this_process() if len(self.members) > 1 else None
        )
        self.group_name = "" if group is None else group.group_name
        self.calls: CallLog = CallLog()
        if self.watchdog is not None:
            if group is not None:
                self.calls = self.watchdog.calls.setdefault(self.group_name, self.calls)
            self.watchdog.look_after(self)

    def issues(self, what: str) -> None:
        """Note that ``what`` is about to be issued; raises as `stop_if_failed` does."""
        self.stop_if_failed(what)
        _progress.issued = (what, time.time())
        if self.watchdog is not None:
            places = self.watchdog.places
            rolls, issued = places.get(self.family, _AT_FIRST)
            places[self.family] = Standing(rolls, issued + 1)
            self.calls.note(what)

    def leaves_pending(self, what: str, works: Sequence[dist.Work]) -> None:
        """Note a collective for which the host will not wait, the last of those under way."""
        if self.watchdog is not None and not self.watchdog.away:
            self.pending = (what, time.time(), works)

    def waits(self, what: str, works: Sequence[dist.Work]) -> None:
        """Wait for ``works``. Raises `CommunicationError` if one fails, or the group has."""
        self.stop_if_failed(what)
        begin = time.time()
        _progress.waiting = (what, begin, self.group_name)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failure(what, error, begin) from error
        finally:
            _progress.waiting = None
        _progress.finished = (what, time.time())

    def failure(
        self, what: str, error: RuntimeError, begin: float | None = None
    ) -> CommunicationError:
        """The error that says what failed here, and what the other ranks are doing.

        ``begin`` is when the wait for it began, None if it could not even be issued.
        """
        waited_s = 0.0 if begin is None else time.time() - begin
        cause = re.sub(r"^\[\S*\] ", "", str(error).partition("\n")[0])  # without C++ source lines
        text = f"{what} failed on rank {self._rank} after {waited_s:.1f} s: {cause}"
        _progress.failed = (what, time.time())
        others = ""
        if self.watchdog is not None:
            parted = self.watchdog.hear(self.family)
            if parted is not None and parted.startswith(PARTED):
                with contextlib.suppress(RuntimeError):  # another rank's end ends the store
                    self.watchdog.publish()
                time.sleep(PERIOD_S / 4)  # the others read it now: their connections are closed
                return CommunicationError(f"{what} is given up on rank {self._rank}: {parted}")
            self.watchdog.announce(self.family, text)
            if waited_s < self.timeout_s:  # a peer broke the connection: see who is silent now
                time.sleep(self.watchdog.settled_s)
            others = self.watchdog.table(self.members)
            time.sleep(FAREWELL_S)
        return CommunicationError(
            f"{text}\nThe group's timeout is {self.timeout_s:g} s.{others}{way_out(others)}"
        )

    def stop_if_failed(self, what: str) -> None:
        """Raise `CommunicationError` if the group has failed, `UsageError` in a forked child."""
        if self._pid != this_process.pid:
            raise forked(self._pid, what)
        watchdog = self.watchdog
        if watchdog is not None and self.family in watchdog.announced:
            text, heard_at = watchdog.announced[self.family]
            if text.startswith(PARTED):
                raise CommunicationError(f"rank {self._rank} stops before {what}: {text}")
            time.sleep(max(0.0, heard_at + watchdog.settled_s - time.time()))
            others = watchdog.table(self.members)
            raise CommunicationError(
                f"rank {self._rank} stops before {what}, since its group has failed: {text}"
                f"{others}{way_out(others)}"
            )

    def overdue(self) -> str | None:
        """Return, once, the call that the device has not completed as the timeout draws near."""
        if self.pending is None:
            return None
        what, begin, works = self.pending
        # Just before the timeout, at which NCCL ends the process.
        if time.time() - begin < max(self.timeout_s - 2 * PERIOD_S, self.timeout_s / 2):
            return None
        self.pending = None
        if all(work.is_completed() for work in works):
            return None
        return f"{what} was issued {time.time() - begin:.1f} s ago"


def period_s_of(world: int) -> float:
    """Return the seconds between two looks of each of ``world`` ranks at the store."""
    return max(PERIOD_S, world / RANKS_A_SECOND)


class Watchdog:
    """The thread that tells the other ranks of this process's world what this one is doing."""

    _current: "Watchdog | None" = None
    _starting = threading.Lock()

    @classmethod
    def of_this_process(cls) -> "Watchdog | None":
        """Return that of the default group, started if need be; None if there is no store."""
        with cls._starting:
            if cls._current is None or not cls._current.is_of_present_world():
                store = own_store()
                if store is None:
                    return None
                cls._current = cls(store)
            return cls._current

    def __init__(self, store: Any):
        self.rank: int = dist.get_rank()
        world = dist.get_world_size()
        self.period_s: float = period_s_of(world)
        self._hurries = _random.random() < RANKS_A_SECOND / (4 * world)  # when it is stuck
        self.announced: dict[str, _Event] = {}  # the first failure in each family, when heard
        self.places: dict[str, Standing] = {}  # by family
        self.calls: dict[str, CallLog] = {}  # by process group
        self._counted = 0  # calls, when they were last published
        self.rolls: dict[str, str] = {}  # what this rank calls now, by family
        self.listeners: list[Callable[[str], None]] = []  # told of what a device does not complete
        self._last_table = ""  # as the store may be gone when it is wanted
        self._lifeline = connect_to_server_of(store, PERIOD_S)
        self._store_is_gone = False
        self._has_left = False
        self._witnesses: tuple[weakref.ref[Witness], ...] = ()  # replaced whole: two threads use it
        self.store: Any = c10d.PrefixStore("fullshard", store)
        self._world = weakref.ref(dist.group.WORLD)
        self.away: bool = False  # asks no device
        self._asking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    @property
    def settled_s(self) -> float:
        """Seconds after a failure, when ranks that died with it are silent."""
        return (SILENT_PERIODS + 0.5) * self.period_s

    def look_after(self, witness: Witness) -> None:
        """Listen for failures in its family, and look whether its collectives are late."""
        living = [each for each in self._witnesses if each() is not None]
        self._witnesses = (*living, weakref.ref(witness))

    @classmethod
    @contextlib.contextmanager
    def looking_away(cls) -> Iterator[None]:
        """Ask no device within: a question from any thread ends the capture of a CUDA graph."""
        watchdog = cls._current
        if watchdog is None:
            yield
            return
        with watchdog._asking:
            watchdog.away = True
            for each in watchdog._witnesses:
                if (witness := each()) is not None:
                    witness.pending = None
        try:
            yield
        finally:
            watchdog.away = False

    def is_of_present_world(self) -> bool:
        """False once the default process group has been destroyed."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    @contextlib.contextmanager
    def calling(self, what: str, families: Sequence[str]) -> Iterator[None]:
        """Show within that this rank waits in roll calls of ``families`` for ``what``."""
        _progress.calling = (what, time.time())
        self.rolls.update(dict.fromkeys(families, what))
        try:
            yield
        finally:
            _progress.calling = None
            for family in families:
                self.rolls.pop(family, None)

    def stop(self) -> None:
        """End the thread, which must not be inside the store when the interpreter goes."""
        self._ended.set()
        self._thread.join(STORE_TIMEOUT.total_seconds())

    def announce(self, family: str, text: str) -> None:
        """Tell the others that this rank has failed, if nobody has done so before."""
        self.announced.setdefault(family, (text, 0.0))
        if not self.store_lives():
            return
        with contextlib.suppress(RuntimeError):
            self.publish()
            if not self.store.check([_failure_of(family)]):
                self.store.set(_failure_of(family), text)

    def table(self, members: Sequence[int]) -> str:
        """Write a line for each other rank, or several alike; in large groups some are asked."""
        everybody = [rank for rank in members if rank != self.rank]
        others = sorted(_random.sample(everybody, min(RECORDS_READ, len(everybody))))
        if not self.store_lives():
            return self._last_table or f"\n{_UNKNOWN}: {STORE_ENDED}"
        try:
            records = self.read(others)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            return self._last_table or f"\n{_UNKNOWN}: {reason}"
        lines = lines_of(records, SILENT_PERIODS * self.period_s)
        if len(others) < len(everybody):
            lines.append(f"({len(others)} of {len(everybody)} others were asked)")
        self._last_table = "".join(f"\n  {line}" for line in lines)
        return self._last_table

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # a store that fails is as good as none
            while self.is_of_present_world() and self.store_lives():
                self.publish()
                self._listen()
                if self._pause():
                    break
            self._has_left = True
            if self.store_lives():
                self.publish()
        self._store_is_gone = True
        if self._lifeline is not None:
            self._lifeline.close()
        atexit.unregister(self.stop)

    def _pause(self) -> bool:
        """Wait for the next turn, which comes early where this rank is stuck. True: the end."""
        until = time.monotonic() + self.period_s
        while time.monotonic() < until:
            if self._ended.wait(PERIOD_S / 4):
                return True
            if self._hurries and STUCK_S < self._stuck_s() < STUCK_S + 2 * PERIOD_S:
                break
        return False

    def _stuck_s(self) -> float:
        """Return the seconds that the host or the device has spent in the present call."""
        now, waiting = time.time(), _progress.waiting
        begins = [waiting[1]] if waiting is not None else []
        with self._asking:
            for each in self._witnesses:
                pending = None if (witness := each()) is None else witness.pending
                if pending is not None and not all(work.is_completed() for work in pending[2]):
                    begins.append(pending[1])
        return now - min(begins, default=now)

    # [Note: Lifeline]
    # The store of a healthy world ends when the rank that keeps it ends or destroys its process
    # group, a little before or after the others. Who speaks to it then gets an error and prints
    # torch's C++ stack. So we hold a connection of our own to the server, on which nothing is ever
    # said, and look whether it is still open.

    def store_lives(self) -> bool:
        """Return False once the store is known to be gone."""
        if self._lifeline is not None and not self._store_is_gone:
            try:
                self._store_is_gone = self._lifeline.recv(1) == b""
            except BlockingIOError:
                pass
            except OSError:
                self._store_is_gone = True
        return not self._store_is_gone

    def publish(self) -> None:
        """Write what this rank is doing, where the others can read it."""
        record = {"at": time.time(), **asdict(_progress)}
        # Copied whole, as the main thread writes to them.
        record |= {"places": dict(self.places), "rolls": dict(self.rolls), "left": self._has_left}
        counted = sum(log.count for log in list(self.calls.values()))
        if counted == self._counted or self._stuck_s() > STUCK_S:
            calls = {name: list(log.newest) for name, log in list(self.calls.items())}
            if counted == sum(log.count for log in list(self.calls.values())):
                record["calls"] = calls  # of one moment
        self._counted = counted
        self.store.set(str(self.rank), json.dumps(record))

    def _listen(self) -> None:
        for each in self._witnesses:
            witness = each()
            if witness is None:
                continue
            if witness.family not in self.announced and self.hear(witness.family) is not None:
                self.table(witness.members)
            with self._asking:
                late = witness.overdue()
            if late is not None:
                table = self.table(witness.members)
                text = f"fullshard: rank {self.rank}: {late}, not done yet{table}"
                print(text, file=sys.stderr)
                for tell in self.listeners:
                    tell(text)
        if self._stuck_s() > STUCK_S:
            self._look_for_a_parting()

    def hear(self, family: str) -> str | None:
        """Return the first failure in ``family`` on any rank, or None."""
        key = _failure_of(family)
        if family not in self.announced and self.store_lives():
            with contextlib.suppress(RuntimeError):
                if self.store.check([key]):
                    self.announced[family] = (self.store.get(key).decode(), time.time())
        return self.announced[family][0] if family in self.announced else None

    def _look_for_a_parting(self) -> None:
        """Compare calls with those of a few peers. Where they differ, tell all and end waits."""
        witnesses = [witness for each in self._witnesses if (witness := each()) is not None]
        peers = {rank for witness in witnesses for rank in witness.members} - {self.rank}
        records = self.read(_random.sample(sorted(peers), min(PEERS_ASKED, len(peers))))
        calls: dict[str, dict[str, list[tuple[int, str]]]] = {}  # by family and group
        for witness in witnesses:
            calls.setdefault(witness.family, {})[witness.group_name] = list(witness.calls.newest)
        for witness in witnesses:
            ours = calls[witness.family]
            for peer, record in records.items():
                if record is None or "calls" not in record or peer not in witness.members:
                    continue
                wait, its = record["waiting"], record["calls"]
                name = witness.group_name
                text = parting(self.rank, ours[name], peer, its.get(name, ())) or deadlock(
                    self.rank, _progress.waiting, ours, peer, wait, its
                )
                if text is not None and witness.family not in self.announced:
                    self.announce(witness.family, text)
            heard, _ = self.announced.get(witness.family, ("", 0.0))
            if heard.startswith(PARTED) and witness.group is not None:
                wake(witness.group, self.rank, witness.members)

    def read(self, ranks: Sequence[int]) -> dict[int, dict[str, Any] | None]:
        """Return what each rank has last written, or None for a rank that has not."""
        keys = [str(rank) for rank in ranks]
        if self.store.has_extended_api() and self.store.check(keys):
            found: list[bytes | None] = list(self.store.multi_get(keys))
        else:  # a get of what is not there would block
            found = [self.store.get(key) if self.store.check([key]) else None for key in keys]
        return {
            rank: None if text is None else cast(dict[str, Any], json.loads(text))
            for rank, text in zip(ranks, found, strict=True)
        }


_random = random.Random()
_UNKNOWN = "What the other ranks are doing is not known"


def _failure_of(family: str) -> str:
    return f"failed/{family}"
