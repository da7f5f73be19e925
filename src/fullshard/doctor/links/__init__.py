# SPDX-License-Identifier: Apache-2.0
"""Starts or joins ranks, times the engine's collectives between them, and judges the figures."""

from fullshard.doctor.links.measure import (
    SIZES_BYTES,
    Links,
    LinkTime,
    bus_bytes_per_s,
    check_links,
    measure_links,
    unit_bytes_for_most_bandwidth,
)
from fullshard.doctor.links.ranks import joined, measure_locally

__all__ = [
    "SIZES_BYTES",
    "LinkTime",
    "Links",
    "bus_bytes_per_s",
    "check_links",
    "joined",
    "measure_links",
    "measure_locally",
    "unit_bytes_for_most_bandwidth",
]
