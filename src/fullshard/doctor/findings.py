# SPDX-License-Identifier: Apache-2.0
"""What the doctor says: one `Finding` for each thing that is not as it should be."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Severity", "is_severe"]

Severity = Literal["severe", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing found, for people.

    ``severity``: "severe" means that training fails, hangs or learns something else than meant;
    "warning" that it costs time, memory or reproducibility; "note" that it is good to know.
    ``where`` is a host, or a script's ``path:line``; empty for this machine.
    """

    severity: Severity
    what: str
    means: str
    mend: str
    where: str = ""


def is_severe(finding: Finding) -> bool:
    """Whether the command ends with status 1 because of it."""
    return finding.severity == "severe"
