# SPDX-License-Identifier: Apache-2.0
"""Plain models measured before they are sharded, for planning."""

from fullshard.torch.measuring.measure import measure, plan_module, repeated_modules
from fullshard.torch.measuring.record import record_step

__all__ = ["measure", "plan_module", "record_step", "repeated_modules"]
