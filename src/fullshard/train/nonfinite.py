# SPDX-License-Identifier: Apache-2.0
"""What happens at an infinite or NaN loss or gradient: the run stops, or the step is skipped."""

from fullshard.core.errors import FullshardError
from fullshard.train.metrics import Reporter

__all__ = ["NonFiniteError", "turn_away"]


class NonFiniteError(FullshardError, ArithmeticError):
    """A loss or gradient is infinite or NaN; the optimizer has not used it."""


def turn_away(choice: str, step: int, where: str, reporter: Reporter) -> None:
    """Raise `NonFiniteError` for ``step`` (from 0) if ``choice`` is "stop", else say it is skipped.

    ``where`` names the ranks or devices, as in "rank 0, 3".
    """
    what = f"step {step + 1}: loss or gradient is not finite on {where}"
    if choice == "stop":
        raise NonFiniteError(
            f"{what}; stopped before the optimizer used it. A lower optim.lr or a longer "
            "optim.warmup_steps may help; train.on_nonfinite=skip leaves such steps out"
        )
    reporter.say(f"{what}; skipped on all ranks")
