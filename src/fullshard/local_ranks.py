# SPDX-License-Identifier: Apache-2.0
"""Ranks started on this machine: start them, wait for them, end them, say which failed first.

The process that starts them serves the store at which they meet, on the loopback interface alone;
Gloo is told to stay there, too. The store also carries reports back, so that nothing is left behind
when that process is killed: the ranks then end with it (on Linux, where the kernel tells them).
"""

import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from fullshard.core.errors import CommunicationError, FullshardError

LOOPBACK = "127.0.0.1"
_GRACE_S = 5.0  # between asking a rank to end and killing it
_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")
    if hasattr(signal, name)
)


def serve_store() -> TCPStore:
    """Open a store at which ranks of this machine meet, on the loopback interface alone."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def stay_on_loopback() -> None:
    """Tell Gloo in this process and those that it starts to use the loopback interface."""
    own = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if own:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own.pop())


def run_local_ranks(
    function: Callable[..., str | None],
    arguments: tuple[Any, ...],
    nproc: int,
    timeout_s: float | None = None,
    grace_s: float = _GRACE_S,
) -> str | None:
    """Call ``function(*arguments)`` on ``nproc`` new ranks; return what it returned on rank 0.

    Each rank finds RANK, LOCAL_RANK, WORLD_SIZE and the address of the store in its environment, as
    under torchrun. ``function`` must be importable by name. A signal that would end this process
    ends the ranks first, then raises `SystemExit` with 128 plus its number (or
    `KeyboardInterrupt`); they have ``grace_s`` seconds to end by themselves, and if all of them
    choose the same exit code, that is the one that is raised.

    Raises:
        CommunicationError: if a rank fails, in the words of the first that did, or if the ranks
            take longer than ``timeout_s`` seconds. All ranks have ended by then.
    """
    store = serve_store()
    port = store.port
    start: Any = start_processes  # has no types
    print(end="", flush=True)
    processes: Sequence[BaseProcess] = ()
    try:
        with _ended_by_signals():
            begun = (function, arguments, nproc, port)
            processes = start(_rank_main, begun, nproc, join=False, start_method="spawn").processes
            failed = _first_failure(processes, timeout_s)
    except SystemExit:
        _end(processes, grace_s)
        codes = {process.exitcode for process in processes}
        if len(codes) == 1 and (chosen := codes.pop() or 0) > 0:
            raise SystemExit(chosen) from None
        raise
    finally:
        _end(processes, _GRACE_S)
    if failed is not None:
        raise CommunicationError(_words(store, failed, processes[failed].exitcode or 0))
    return store.get("result").decode() if store.check(["result"]) else None


def _rank_main(
    rank: int,
    function: Callable[..., str | None],
    arguments: tuple[Any, ...],
    nproc: int,
    port: int,
) -> None:
    # Ctrl-C reaches every process of the terminal: ranks just end, the launching one reports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # The last one tells torch that the store is there, and not for rank 0 to open.
    os.environ.update(
        MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    stay_on_loopback()
    try:
        result = function(*arguments)
    except Exception as error:
        text = str(error) if isinstance(error, FullshardError) else traceback.format_exc()
        store = TCPStore(LOOPBACK, port, is_master=False)
        store.set(f"failure {store.add('failures', 1)}", f"{rank}\n{text}")
        # One failing rank makes the others fail at their next collective. The wait lets the
        # launcher see one that was killed, and wrote no report, before those that noticed.
        time.sleep(0.5)
        os._exit(1)
    if rank == 0 and result is not None:
        TCPStore(LOOPBACK, port, is_master=False).set("result", result)


def _first_failure(processes: Sequence[BaseProcess], timeout_s: float | None) -> int | None:
    """Wait; the number of the rank that ended first other than well, None if all ended well."""
    ranks = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while ranks:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(ranks), left_s)
        if not ready:
            raise CommunicationError(
                f"{len(processes)} local ranks have not finished within {timeout_s:g} s"
            )
        ended = [ranks.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]
        for rank in ended:
            processes[rank].join()
        codes = {rank: processes[rank].exitcode or 0 for rank in ended}
        if any(codes.values()):
            return min(codes, key=lambda rank: (codes[rank] >= 0, codes[rank] == 0))
    return None


def _words(store: TCPStore, rank: int, code: int) -> str:
    if code > 0 and store.check(["failure 1"]):
        first, _, text = store.get("failure 1").decode().partition("\n")
        return f"rank {first} failed: {text}"
    if code < 0:
        return f"rank {rank} was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"rank {rank} ended with exit code {code}"


def _end(processes: Sequence[BaseProcess], grace_s: float) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raise `SystemExit` where a signal would end this process on the spot."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return
    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
