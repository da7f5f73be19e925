# SPDX-License-Identifier: Apache-2.0
"""Runs of days on thousands of devices: failures, stragglers, checkpoints, and what is left."""

from fullshard.plan.scale.curve import (
    Crossover,
    ScalePoint,
    draw_scaling,
    scaling_curve,
    where_hybrid_wins,
)
from fullshard.plan.scale.faults import Faults
from fullshard.plan.scale.simulation import Goodput, Work, simulate

__all__ = [
    "Crossover",
    "Faults",
    "Goodput",
    "ScalePoint",
    "Work",
    "draw_scaling",
    "scaling_curve",
    "simulate",
    "where_hybrid_wins",
]
