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
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from fullshard.torch.unit.streams import CopiesUnderWay


@dataclass(eq=False)
class _Update:
    copies: CopiesUnderWay  # behind which it may be made
    make: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


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
        with self._lock:
            self._waiting.append(update)
        _unfinished.add(update.done)
        self._executor.submit(self._make_next)
        return lambda: self._await(update)

    def _make_next(self) -> None:
        with self._lock:
            update = self._choose()
            self._waiting.remove(update)
        try:
            update.copies.wait()
            update.make()
        except BaseException as error:
            update.done.set_exception(error)
        else:
            update.done.set_result(None)

    def _choose(self) -> _Update:
        arrived = [update for update in self._waiting if update.copies.are_done()]
        if self._awaited in arrived:
            return self._awaited
        return arrived[-1] if arrived else self._waiting[0]

    def _await(self, update: _Update) -> None:
        self._awaited = update
        try:
            update.done.result()
        finally:
            self._awaited = None


_unfinished: weakref.WeakSet[Future[None]] = weakref.WeakSet()


def _finish_all() -> None:
    """Wait for all updates: a fork has no thread that would make them."""
    wait(list(_unfinished))


os.register_at_fork(before=_finish_all)
