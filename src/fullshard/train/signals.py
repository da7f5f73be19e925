# SPDX-License-Identifier: Apache-2.0
"""Signals that ask a run to leave; loaded before all that takes long to load."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COME_AGAIN = 75  # exit status after a signal: saved, start it again (EX_TEMPFAIL of sysexits.h)


class StopRequest:
    """The wish that the run saves and leaves: the signal that brought it, or 0."""

    def __init__(self) -> None:
        self.signal = 0


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Take SIGTERM and SIGUSR1 (SLURM's warning), in the main thread, as a wish to leave."""
    request = StopRequest()

    def note(number: int, _: object) -> None:
        request.signal = number

    with _answering(note):
        yield request


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Raise `SystemExit` with `COME_AGAIN` on the same signals: there is nothing to save yet."""

    def leave(_: int, __: object) -> None:
        raise SystemExit(COME_AGAIN)

    with _answering(leave):
        yield


@contextmanager
def _answering(answer: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, answer) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
