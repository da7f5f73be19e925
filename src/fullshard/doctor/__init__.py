# SPDX-License-Identifier: Apache-2.0
"""``fullshard doctor`` looks at this machine and the links between ranks."""

from fullshard.doctor.command import check_hosts, main, parse_size

__all__ = ["check_hosts", "main", "parse_size"]
