# SPDX-License-Identifier: Apache-2.0
"""What processes with different numbers of batches are given."""

from fullshard.torch.comm.uneven_inputs import any_rank, pad_to_longest, stop_together


def turns(group):
    """The last rank has two batches, the others one."""
    last = group.rank() == group.size() - 1
    mine = ["a", "b"] if last else ["a"]
    return (
        list(stop_together(mine, group)),
        list(pad_to_longest(mine, group)),
        any_rank(last, group),
    )
