# SPDX-License-Identifier: Apache-2.0
"""Python in a process of its own, whose output is the answer."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fullshard.core.errors import FullshardError

_SOURCES = Path(__file__).resolve().parents[2]


def ask_python(arguments: Sequence[str], timeout_s: float, folder: Path | None = None) -> str:
    """Run Python with ``arguments``, in ``folder`` and importing from there; return its stdout.

    Raises:
        FullshardError: it failed, with its last words, or took longer than ``timeout_s``.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*([str(folder)] if folder else []), str(_SOURCES), *([inherited] if inherited else [])]
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise FullshardError(
            f"python {arguments[-1]} took longer than {timeout_s:.0f} s"
        ) from error
    if done.returncode != 0:
        words = done.stderr.strip()[-800:] or f"exit status {done.returncode}"
        raise FullshardError(f"python {arguments[-1]} failed: {words}")
    return done.stdout
