# SPDX-License-Identifier: Apache-2.0
"""One process at a time saves into a run folder.

The process of rank 0 locks ``.lock`` in the folder at its first save and until it ends, however it
ends; the system gives the lock back. The file says who has it, for the text of the refusal. File
systems without locks are used without one.
"""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from fullshard.checkpoint.files import Files, OpenFile
from fullshard.core.errors import CheckpointError

LOCK = ".lock"
_MOST = 64  # folders that a process keeps locked; of more the ones that were used first are freed
_locked: dict[tuple[int, str], OpenFile] = {}
_changing = threading.Lock()


def lock_run(files: Files, run: Path) -> None:
    """Lock ``run`` until this process ends. Raises `CheckpointError` if another saves there."""
    path = run / LOCK
    key = (os.getpid(), os.path.realpath(path))  # a fork has no locks of its parent
    with _changing:
        known = _locked.pop(key, None)
        if known is not None and not _is_same(known, path):
            os.close(known.descriptor)
            known = None
        if known is None:
            known = _taken(files, run, path)
        _locked[key] = known
        while len(_locked) > _MOST:
            os.close(_locked.pop(next(iter(_locked))).descriptor)


def _taken(files: Files, run: Path, path: Path) -> OpenFile:
    owner = ""
    try:
        return files.lock(path, f"process {os.getpid()} on {socket.gethostname()}, {_now()}\n")
    except BlockingIOError as error:
        with contextlib.suppress(OSError):
            owner = path.read_text("utf-8", "replace").strip()[:200]
        raise CheckpointError(
            f"{run} is in use: {owner or 'another process'} saves into it. A run "
            "folder belongs to one run at a time: give this one its own, or end the other",
            file=str(path),
        ) from error


def _now() -> str:
    return f"since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"


def _is_same(known: OpenFile, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(known.descriptor), path.stat())
    except OSError:
        return False
