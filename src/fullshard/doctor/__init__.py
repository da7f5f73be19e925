# SPDX-License-Identifier: Apache-2.0
"""``fullshard doctor`` looks at this machine, the links between ranks, and training scripts."""

from fullshard.doctor.command import check_hosts, main, parse_size

__all__ = ["check_hosts", "main", "parse_size"]
