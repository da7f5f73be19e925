# SPDX-License-Identifier: Apache-2.0
"""Models whose step was recorded, as planning knows models."""

from fullshard.plan.measured.model import MeasuredModel

__all__ = ["MeasuredModel"]
