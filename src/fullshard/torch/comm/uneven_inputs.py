# SPDX-License-Identifier: Apache-2.0
"""Loops over unequal work: ranks with different numbers of batches, or sequences that end apart.

A rank without work must still take part in every gather and reduce, so it has to run the model as
often as the others do. (DDP's ``join`` can answer for a model that is not run; here parameters are
gathered in the middle of it.) What is left to agree on is when to end, and what a rank does that
has nothing of its own:

================ ============================================ ================================
function         when the first rank has no batch left        costs
================ ============================================ ================================
`stop_together`  all end                                      what is left on the others
`pad_to_longest` it repeats its last batch with weight zero   its time, until the last one ends
`any_rank`       (a vote, for loops of one's own)             the host waits for all ranks
================ ============================================ ================================

Each of the first two votes with one all-reduce of 16 bytes for each rank, on the host and one batch
ahead, so that the answer is there when it is asked for; they hold one batch more than a plain loop.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.strategy import ShardingStrategy
from fullshard.torch.comm.protocol import Comm, Work
from fullshard.torch.comm.ranks import Where, ranks_of

T = TypeVar("T")

_HAS_BATCH, _AT_END, _HAS_NOTHING = 1.0, 0.0, -1.0  # votes
_END = object()


def any_rank(flag: bool, group: Where = None) -> bool:
    """Return True on every rank if ``flag`` is true on one of them.

    Collective over ``group``, by default all ranks. For generation, where a rank whose sequences
    have ended keeps running the model while ``any_rank(not finished)``.
    """
    vote = torch.tensor(int(flag), device="cpu")
    _comm_of(group).all_reduce([vote], "max", label="any_rank").wait()
    return bool(vote.item())


def stop_together(batches: Iterable[T], group: Where = None) -> Iterator[T]:
    """Yield batches of this rank, as many as the rank with the fewest has.

    Every step is collective over ``group``, by default all ranks: iterate on all of them.
    """
    for batch, *_ in _turns(batches, _comm_of(group), min):
        yield batch


def pad_to_longest(
    batches: Iterable[T],
    group: Where = None,
    *,
    size_of: Callable[[T], float] | None = None,
    spare: T | None = None,
) -> Iterator[tuple[T, float]]:
    """Yield pairs (batch, weight), as many as the rank with the most batches has.

    Multiply the loss by the weight. A rank that has no batch left gets its last one again (or
    ``spare``, if it never had one), with weight 0; the others' weights make up for it, so that the
    gradient is the mean over the ranks that have a batch. With ``size_of`` (the samples of a batch,
    or the tokens that count) it is the mean over all of those, also where batches differ in size,
    if each loss is the mean over its own batch. The mean of the weights over the ranks is 1.

    Repeated batches run as others do: they draw random numbers and move a batch norm's statistics,
    and a loss that is not finite spoils the gradients whatever its weight. Every step is collective
    over ``group``, by default all ranks: iterate on all of them.

    Raises, on all ranks: UsageError if a rank never had a batch and has no ``spare``;
    ConfigurationError if ``size_of`` gave anything but a finite number of at least 0.
    """
    for batch, size, votes, sizes in _turns(batches, _comm_of(group), max, size_of, spare):
        if _HAS_NOTHING in votes:
            without = [rank for rank, vote in enumerate(votes) if vote == _HAS_NOTHING]
            raise UsageError(
                f"ranks {without} have not a single batch to run the model with; give every rank "
                "at least one, or pass a batch of the usual form as spare (it will count nothing)"
            )
        if not all(math.isfinite(each) and each >= 0 for each in sizes):
            raise ConfigurationError(
                f"size_of must give finite numbers of at least 0, the ranks got {sizes}"
            )
        total = sum(sizes)
        yield batch, size * len(sizes) / total if total else 0.0


def _turns(
    batches: Iterable[T],
    comm: Comm,
    agree: Callable[[list[float]], float],
    size_of: Callable[[T], float] | None = None,
    spare: T | None = None,
) -> Iterator[tuple[T, float, list[float], list[float]]]:
    """Yield steps for as long as the ranks ``agree`` that there is a batch.

    A step is this rank's batch and its size, and all ranks' votes and sizes in rank order. The next
    batch is fetched, and its vote is in flight, when a step is yielded.
    """
    iterator = iter(batches)
    last: Any = spare

    def look_ahead() -> tuple[Any, float, Tensor, Work]:
        nonlocal last
        batch: Any = next(iterator, _END)
        if batch is _END:
            vote, size = (_HAS_NOTHING if last is None else _AT_END), 0.0
        else:
            last, vote, size = batch, _HAS_BATCH, float(size_of(batch)) if size_of else 1.0
        said = torch.zeros(2, comm.size, dtype=torch.float64, device="cpu")
        said[:, comm.rank] = torch.tensor([vote, size], dtype=torch.float64, device="cpu")
        return last, size, said, comm.all_reduce([said], label="uneven inputs")

    ahead = look_ahead()
    while True:
        batch, size, said, work = ahead
        work.wait()
        votes, sizes = said.tolist()
        if agree(votes) != _HAS_BATCH:
            return
        ahead = look_ahead()
        yield batch, size, votes, sizes


def _comm_of(group: Where) -> Comm:
    return ranks_of(group, ShardingStrategy.FULL_SHARD.sharding).gather
