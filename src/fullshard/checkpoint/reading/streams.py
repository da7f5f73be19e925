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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

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
    runs = list(_runs(items, sizes))
    threads = min(thread_count(), len(runs))
    if threads <= 1:
        for item in items:
            yield work(item)
        return
    handed: queue.Queue[tuple[Result] | None] = queue.Queue(threads)
    stopped = threading.Event()

    def read(run: Sequence[Item]) -> None:
        try:
            for item in run:
                if stopped.is_set():
                    return
                handed.put((work(item),))
        except BaseException:
            stopped.set()
            raise
        finally:
            handed.put(None)

    with ThreadPoolExecutor(threads, "fullshard-read") as pool:
        reads = [pool.submit(read, run) for run in runs]
        try:
            left = len(runs)
            while left:
                result = handed.get()
                if result is None:
                    left -= 1
                else:
                    yield result[0]
        finally:
            stopped.set()
            while not all(each.done() for each in reads):
                with suppress(queue.Empty):
                    handed.get(timeout=0.01)
    for each in reads:
        each.result()


def _runs(items: Sequence[Item], sizes: Sequence[int]) -> Iterator[Sequence[Item]]:
    first = run_bytes = 0
    for number, size_bytes in enumerate(sizes):
        run_bytes += size_bytes
        if run_bytes >= RUN_BYTES:
            yield items[first : number + 1]
            first, run_bytes = number + 1, 0
    if first < len(items):
        yield items[first:]
