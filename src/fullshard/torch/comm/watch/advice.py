# SPDX-License-Identifier: Apache-2.0
"""Advice on a failure, derived from what the other ranks are doing."""

__all__ = ["LEFT", "NOTHING_AWAITED", "STORE_ENDED", "way_out"]

LEFT = "has left the process group"
NOTHING_AWAITED = "waits for nothing"
STORE_ENDED = "the process that keeps the store has ended"


def way_out(table: str) -> str:
    """Return one more line for an error that shows the ``table`` of a watchdog, or nothing.

    A rank whose loop has ended before the others' has left, or goes on with something else.
    """
    if not any(sign in table for sign in (LEFT, NOTHING_AWAITED, STORE_ENDED)):
        return ""
    return (
        "\nIf ranks have unequal numbers of batches, let their loops end together: "
        "for batch in fullshard.torch.stop_together(batches), or with pad_to_longest(batches)"
    )
