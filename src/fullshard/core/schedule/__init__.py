# SPDX-License-Identifier: Apache-2.0
"""The schedule: which units to gather, free and reduce after each event of a step.

`step` tells events by what hooks hear, `record` what events foretell, `rules` which ops follow
them, `scheduler` records and replays steps while they run.
"""

from fullshard.core.schedule.record import Event, Moment
from fullshard.core.schedule.rules import (
    OF_PARAMETERS,
    Op,
    OpKind,
    UnitPolicy,
    compile_step,
    unit_policy,
)
from fullshard.core.schedule.scheduler import Scheduler

__all__ = [
    "OF_PARAMETERS", "Event", "Moment", "Op", "OpKind", "Scheduler", "UnitPolicy", "compile_step",
    "unit_policy",
]  # fmt: skip
