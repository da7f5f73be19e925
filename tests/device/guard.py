# SPDX-License-Identifier: Apache-2.0
"""Builds and loads `guard.cpp`, with which a CPU build of torch has fake tensors on CUDA.

Loaded before torch is imported, as torch asks for its CUDA hooks once, while it is imported.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
TORCH = Path(importlib.util.find_spec("torch").origin).parent


def why_not():
    """The reason why no device can be simulated here, or None."""
    if (TORCH / "lib" / "libtorch_cuda.so").exists():
        return "this torch has CUDA of its own; the simulation needs a CPU build"
    if not (TORCH / "lib" / "libtorch_cpu.so").exists():
        return "the simulation is for Linux"
    if _built().exists() or _compiler() is not None:
        return None
    return "a C++ compiler is needed once, to build tests/device/guard.cpp"


def load():
    """Let this process have CUDA tensors within FakeTensorMode, for good; build once."""
    built = _built()
    if not built.exists():
        _build(built)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(TORCH / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


def _compiler():
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _built():
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = SOURCE.read_bytes() + version("torch").encode()
    return Path(cache) / "fullshard" / f"guard-{hashlib.sha256(key).hexdigest()[:16]}.so"


def _build(built):
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        include = TORCH / "include"
        options = ["-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{include}"]
        links = [f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
        command = [_compiler(), *options, str(SOURCE), "-o", str(made), *links]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(built)  # whole or not at all: others may look for it now
