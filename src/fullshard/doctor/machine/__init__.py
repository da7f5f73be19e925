# SPDX-License-Identifier: Apache-2.0
"""Takes a snapshot of one machine and lists the faults that training would run into."""

from fullshard.doctor.machine.checks import check_machine, files_needed
from fullshard.doctor.machine.environment import check_environment
from fullshard.doctor.machine.snapshot import Gpu, Machine, Space, facts, read_machine

__all__ = [
    "Gpu",
    "Machine",
    "Space",
    "check_environment",
    "check_machine",
    "facts",
    "files_needed",
    "read_machine",
]
