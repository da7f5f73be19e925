# SPDX-License-Identifier: Apache-2.0
"""Threads that read files from their beginning to their end.

[Note: Long runs]
A disk is fastest when each thread reads a long way in order: the system then fetches what comes
next while a chunk is verified. Threads that take turns within a file, or that announce a whole file
at once, make it ask for small parts and cost several times the processor time (docs/log.md has
figures). So what is to be read is put into the order of the files and cut into few long runs.
"""

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["RUN_BYTES", "in_streams", "thread_count"]

RUN_BYTES = 64 * 2**20  # that a thread reads before it takes up something else
MOST_THREADS = 4

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count() -> int:
    """Count the threads that read: this rank's share of the processors, at most 4."""
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    ranks = int(told) if told.isdecimal() else 1
    return max(1, min(MOST_THREADS, cores // max(1, ranks)))


def in_streams(
    work: Callable[[Item], Result], items: Sequence[Item], sizes: Sequence[int]
) -> Iterator[Result]:
    """The results of ``work`` for each of ``items``, which has so many bytes, as they come.

    Items that follow each other are worked on by one thread, in order; with a single run or a
    single processor by the caller's own. A few results wait for the caller. The first failure ends
    it; of failures in several threads that of the foremost item is raised.
    """
    runs = deque(_runs(items, sizes))
    threads = min(thread_count(), len(runs))
    if threads <= 1:
        for run in runs:
            for _, item in run:
                yield work(item)
        return
    crew = _Crew(work, runs, threads)
    try:
        yield from crew.results()
    finally:
        crew.dismiss()
    if crew.failures:
        raise min(crew.failures, key=lambda each: each[0])[1]


def _runs(items: Sequence[Item], sizes: Sequence[int]) -> Iterator[list[tuple[int, Item]]]:
    run: list[tuple[int, Item]] = []
    held = 0
    for number, (item, size_bytes) in enumerate(zip(items, sizes, strict=True)):
        run.append((number, item))
        held += size_bytes
        if held >= RUN_BYTES:
            yield run
            run, held = [], 0
    if run:
        yield run


class _Crew(Generic[Item, Result]):
    """Threads that take runs, and hand over results through a short queue."""

    def __init__(
        self,
        work: Callable[[Item], Result],
        runs: deque[list[tuple[int, Item]]],
        threads: int,
    ):
        self._work, self._runs = work, runs
        self._stopped = threading.Event()
        self._handed: queue.Queue[tuple[Result] | None] = queue.Queue(threads)
        self.failures: list[tuple[int, BaseException]] = []
        self._threads = [
            threading.Thread(target=self._read, name="fullshard-read", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def results(self) -> Iterator[Result]:
        """Everything that is handed over, until all threads are done."""
        working = len(self._threads)
        while working:
            handed = self._handed.get()
            if handed is None:
                working -= 1
            else:
                yield handed[0]

    def dismiss(self) -> None:
        """Let the threads end after what they are at, and wait for them."""
        self._stopped.set()
        while any(thread.is_alive() for thread in self._threads):
            with suppress(queue.Empty):
                self._handed.get(timeout=0.01)

    def _read(self) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    run = self._runs.popleft()
                except IndexError:
                    break
                for number, item in run:
                    if self._stopped.is_set():
                        break
                    try:
                        self._handed.put((self._work(item),))
                    except BaseException as error:
                        self.failures.append((number, error))
                        self._stopped.set()
        finally:
            self._handed.put(None)
