# SPDX-License-Identifier: Apache-2.0
"""The origin of a proof: the commit, the source, the versions and the machine."""

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from fullshard.core.tested import installed_version

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = ("fullshard", "torch", "numpy")


@dataclass(frozen=True)
class Provenance:
    """``commit`` is None outside of a checkout, and ``dirty`` lists files that differ from it.

    ``source_sha256`` is over the paths and bytes of all Python files of the package, in order.
    """

    commit: str | None
    dirty: tuple[str, ...]
    source_sha256: str
    versions: dict[str, str]
    python: str
    system: str
    cores: int
    gpu: str
    command: str
    made_at: str


def checkout() -> Path | None:
    """Return the root of the source checkout that this package runs from, None if there is none."""
    root = _PACKAGE.parents[1]
    return root if (root / ".git").exists() and (root / "pyproject.toml").is_file() else None


def provenance(command: str) -> Provenance:
    """Read everything that the page is bound to; asks git, if this is a checkout."""
    root = checkout()
    commit = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain")
    return Provenance(
        commit=commit,
        dirty=tuple(line[3:] for line in (changed or "").splitlines()),
        source_sha256=_digest(),
        versions={name: installed_version(name) or "not installed" for name in _LIBRARIES},
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        command=command,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _git(root: Path | None, *arguments: str) -> str | None:
    if root is None:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # no git here, or a folder that git does not trust
    return done.stdout.rstrip("\n")


def _digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
