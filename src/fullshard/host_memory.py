# SPDX-License-Identifier: Apache-2.0
"""Physical memory of this process and of its host."""

import os
import re
import resource
import sys
from contextlib import suppress

_MEMORY = re.compile(r"VmHWM:\s*(?P<peak>\d+) kB\s*VmRSS:\s*(?P<now>\d+) kB")  # kB are KiB


def resident_bytes() -> tuple[int | None, int]:
    """Physical memory of this process, now (None where nobody says) and at its peak."""
    with suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        if found := _MEMORY.search(status.read()):
            return int(found["now"]) * 1024, int(found["peak"]) * 1024
    # Counts KiB, but bytes on macOS; on Linux it would be that of the parent process, if larger.
    unit = 1 if sys.platform == "darwin" else 1024
    return None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_total_bytes() -> int:
    """Physical memory of the host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
