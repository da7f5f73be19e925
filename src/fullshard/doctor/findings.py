# SPDX-License-Identifier: Apache-2.0
"""The doctor's findings: one `Finding` for each problem."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["severe", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One problem, described for people: what it is, what it means and how to fix it.

    ``severity``: "severe" means that training fails, hangs or learns something else than intended;
    "warning" that the problem costs time, memory or reproducibility; "note" is information.
    ``where`` is a host, or a script's ``path:line``; empty for this machine.
    """

    severity: Severity
    what: str
    means: str
    fix: str
    where: str = ""
