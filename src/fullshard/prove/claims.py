# SPDX-License-Identifier: Apache-2.0
"""Claims with their verdicts: the common word of everything that `fullshard prove` measures."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["holds", "fails", "not proved"]


@dataclass(frozen=True)
class Claim:
    """One sentence that is true or not, with the figure that decides and what it is held against.

    A claim that could not be tried here is "not proved", and ``figure`` says why.
    """

    what: str
    verdict: Verdict
    figure: str
    bound: str = ""

    @classmethod
    def that(cls, what: str, true: bool, figure: str, bound: str) -> "Claim":
        """Return a claim that was tried: it holds if ``true``."""
        return cls(what, "holds" if true else "fails", figure, bound)


@dataclass(frozen=True)
class Section:
    """Claims about one subject; ``how`` they were tried, in sentences.

    ``data`` is what was measured, in values that JSON knows; the page for people leaves it out.
    """

    title: str
    how: str
    claims: tuple[Claim, ...]
    data: Any = None


def verdict_of(sections: Iterable[Section]) -> Verdict:
    """Return "fails" if any claim does, "holds" if all others hold and there is at least one."""
    verdicts = {claim.verdict for each in sections for claim in each.claims}
    if "fails" in verdicts:
        return "fails"
    return "holds" if "holds" in verdicts else "not proved"
