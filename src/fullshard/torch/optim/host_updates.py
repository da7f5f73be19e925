# SPDX-License-Identifier: Apache-2.0
"""Updates of what rests on the host, by a thread of its own.

[Note: The last first]
Backward delivers the last unit first, and the next forward wants the first unit first. So of the
updates whose gradients have arrived the thread takes the one that it was given last: in backward it
has little to choose from, and when backward ends the first units come next, which forward awaits.
The last ones are updated while the device works at those before. Units come in halves: so when
backward ends even the last one has something left to be updated, beside which forward computes all
the others.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event, Lock

from fullshard.torch.unit.streams import CopiesUnderWay

_POLL_S = 1e-4
_AT_EXIT_S = 10.0
"""How long a program that ends waits for copies: a rank may be gone, and never send its part."""


@dataclass(eq=False)
class _Update:
    copies: CopiesUnderWay  # behind which it may be made
    make: Callable[[], None]
    done: Future[None] = field(default_factory=Future)

    def may_be_made(self) -> bool:
        """Return True if its copies are done, or fail, which `run` then tells."""
        try:
            return self.copies.are_done()
        except Exception:
            return True

    def run(self) -> None:
        """Make it when its copies are done; whoever waits gets its error."""
        try:
            ends_s = None
            while not self.copies.are_done():  # a device's own wait would take a core
                time.sleep(_POLL_S)
                if _ending.is_set():
                    ends_s = ends_s or time.monotonic() + _AT_EXIT_S
                    if time.monotonic() > ends_s:
                        raise TimeoutError("the program has ended, and gradients do not arrive")
            self.make()
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class HostUpdates:
    """A thread that makes updates; see [Note: The last first]."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fullshard-updates")
        self._lock = Lock()
        self._waiting: list[_Update] = []
        self._awaited: _Update | None = None

    def begin(self, copies: CopiesUnderWay, make: Callable[[], None]) -> Callable[[], None]:
        """Let the thread ``make`` an update once the ``copies`` are done.

        Returns what waits for it, and raises what it raised.
        """
        update = _Update(copies, make)
        try:
            with self._lock:
                self._waiting.append(update)
            with _lock:
                _unfinished.add(update.done)
            self._executor.submit(self._make_next)
        except BaseException as error:
            with self._lock:
                left = update in self._waiting
                if left:
                    self._waiting.remove(update)
            if not isinstance(error, RuntimeError):
                with _lock:
                    _unfinished.discard(update.done)
                raise
            if left:
                update.run()  # there is no thread, as after the end of the main one
        return lambda: self._await(update)

    def _make_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            update = self._choose()
            self._waiting.remove(update)
        update.run()

    def _choose(self) -> _Update:
        ready = [update for update in self._waiting if update.may_be_made()]
        if self._awaited in ready:
            return self._awaited
        return ready[-1] if ready else self._waiting[0]

    def _await(self, update: _Update) -> None:
        self._awaited = update
        try:
            update.done.result()
        finally:
            self._awaited = None


_ending = Event()
# Executors' threads are joined before the main one counts as ended, and before what `atexit` runs;
# they hear of the end by this call, too, and it runs what was registered last first.
threading._register_atexit(_ending.set)  # type: ignore[attr-defined]
_lock = Lock()
_unfinished: weakref.WeakSet[Future[None]] = weakref.WeakSet()


def _finish_all() -> None:
    """Wait for all updates: a fork has no thread that would make them."""
    with _lock:
        unfinished = list(_unfinished)
    wait(unfinished)


os.register_at_fork(before=_finish_all)
