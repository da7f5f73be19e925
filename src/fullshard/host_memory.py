# SPDX-License-Identifier: Apache-2.0
"""Physical memory of this process and of its host."""

import os
import resource
import sys
from pathlib import Path

__all__ = ["host_total_bytes", "resident_bytes"]


def resident_bytes() -> tuple[int | None, int]:
    """Physical memory of this process, now (None where nobody says) and at its peak."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmRSS" in lines and "VmHWM" in lines:  # both in kB, which are KiB
            return int(lines["VmRSS"].split()[0]) * 1024, int(lines["VmHWM"].split()[0]) * 1024
    # Counts KiB, but bytes on macOS; on Linux it would be that of the parent process, if larger.
    unit = 1 if sys.platform == "darwin" else 1024
    return None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_total_bytes() -> int:
    """Physical memory of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
