# SPDX-License-Identifier: Apache-2.0
"""The roll call: before a collective that people may call on one rank only, wait for all ranks."""

import hashlib
import random
import time
from collections.abc import Sequence
from typing import Any

from fullshard.core.errors import FullshardError, UsageError
from fullshard.torch.comm.process_group import witness_of
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.watch.watchdog import PERIOD_S, Standing, Watchdog, Witness

PATIENCE_S = 0.5  # for so long nobody asks where the others are
LONGEST_PAUSE_S = 0.02  # between two looks at the counter, and a little more for each rank
PEERS_ASKED = 64  # at a time, whatever the size of the group
LEAVING_S = 5.0  # for which a rank that leaves waits for others that are leaving

# [Note: A roll call sends nothing]
# A rank that calls `state_dict()` alone must not meet the others' next gather. So ranks count
# themselves in the store, where a rank can be taken off again, and issue collectives only when all
# are there. Whoever waits looks at what the watchdogs write: how many roll calls a rank has
# completed in the group's family, and how many collectives it has issued since. All ranks issue the
# same ones in the same order, and after a roll call that is not complete nobody has issued any. So
# a rank that has issued more than this one is elsewhere, and one that has issued less is late.


def call_roll(comms: Sequence[Comm] | Comm, what: str, instead: str) -> None:
    """Return when all ranks of ``comms`` have called it for the same ``what``. Sends nothing.

    To be called at the head of what is collective and may be called on some ranks only by mistake.
    ``what`` names it to people, such as "state_dict()"; it is the same on all ranks. ``instead``
    says what to write. Ranks may come at very different times, and each may call the roll of
    several groups at once. Costs a few round trips to the default store.

    Returns at once for communicators that are not of torch.distributed or without a store.

    Raises:
        UsageError: on this rank, within about 2 s of a peer being in another collective of ours
            than this rank, calling the roll for something else, or having left; at the group's
            timeout if a peer does not come. The other ranks are not affected, and this one may
            join them if it catches the error.
        CommunicationError: if the group has failed.
    """
    witnesses: dict[str, Witness] = {}
    for comm in comms if isinstance(comms, Sequence) else [comms]:
        witness = witness_of(comm)
        if witness is not None and witness.watchdog is not None:
            witness.stop_if_failed(what)
            if witness.watchdog.store_lives():
                witnesses[witness.family] = witness
    rolls = [
        _Roll(witness, witness.watchdog, what)
        for witness in witnesses.values()
        if witness.watchdog is not None
    ]
    if not rolls:
        return
    with rolls[0].watchdog.calling(what, list(witnesses)):
        try:
            problem = _wait_for_all(rolls, what)
        except FullshardError:
            raise
        except RuntimeError:  # the store has ended: as if there were none
            return
    if problem is not None:
        raise UsageError(f"{problem}\nInstead, {instead}")


class _Roll:
    """The roll of one group, kept in the store under its family's name."""

    def __init__(self, witness: Witness, watchdog: Watchdog, what: str):
        self.witness = witness
        self.watchdog = watchdog
        self._what = what
        self._size = len(witness.members)
        self._others = [rank for rank in witness.members if rank != watchdog.rank]
        number = watchdog.places.get(witness.family, Standing()).rolls
        subject = hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        self._key = f"roll/{witness.family}/{number}/{subject}"
        self._completed = self._add(1) >= self._size

    # The counter goes up to the group's size as ranks come, and up to twice that as they see that
    # all are there; the last one to see it removes the counter.

    def is_complete(self) -> bool:
        """True once all ranks have come; this rank then goes on."""
        if not self._completed and self._add(0) < self._size:
            return False
        place = self.watchdog.places.get(self.witness.family, Standing())
        self.watchdog.places[self.witness.family] = Standing(place.rolls + 1)
        if self._add(1) == 2 * self._size:
            self.watchdog.store.delete_key(self._key)
        return True

    def leave(self) -> None:
        """Take this rank off, unless the roll is complete by then: `is_complete` tells."""
        # One at a time: then the counter shows whether it had reached the size before.
        lock, me = f"{self._key}/leaving", str(self.watchdog.rank)
        deadline = time.monotonic() + LEAVING_S
        while self.watchdog.store.compare_set(lock, "", me) != me.encode():
            if time.monotonic() > deadline:  # its owner has died
                break
            time.sleep(PERIOD_S / 100)
        if self._add(-1) + 1 >= self._size:
            self._add(1)
            self._completed = True
        self.watchdog.store.delete_key(lock)

    def strays(self) -> list[int]:
        """Ranks that are seen where they cannot come from to this roll."""
        # Their own random numbers: the program's must not depend on how fast others are.
        asked = sorted(_random.sample(self._others, min(PEERS_ASKED, len(self._others))))
        records = self.watchdog.read(asked)
        return [rank for rank, record in records.items() if record and self._is_elsewhere(record)]

    def _is_elsewhere(self, record: dict[str, Any]) -> bool:
        family = self.witness.family
        place = Standing(*record["places"].get(family, ()))
        mine = self.watchdog.places.get(family, Standing())
        if place.rolls != mine.rolls:  # the record is older than the last roll call
            return False
        calls = record["rolls"].get(family, self._what)
        return bool(place.issued > mine.issued or calls != self._what or record["left"])

    def _add(self, count: int) -> int:
        return int(self.watchdog.store.add(self._key, count))


_random = random.Random()


def _wait_for_all(rolls: list[_Roll], what: str) -> str | None:
    """Wait until all ``rolls`` are complete; else leave them, and return what is wrong."""
    begin = time.monotonic()
    look_at = begin + PATIENCE_S
    open_rolls = rolls
    try:
        while True:
            # A stray is one only if the roll is still not complete after it was seen elsewhere.
            found = None
            waited_s = time.monotonic() - begin
            if begin + waited_s >= look_at:
                look_at += PATIENCE_S
                found = _what_is_wrong(open_rolls, what, waited_s)
            open_rolls = [roll for roll in open_rolls if not roll.is_complete()]
            if found is not None and open_rolls:
                for roll in open_rolls:
                    roll.leave()
                open_rolls = [roll for roll in open_rolls if not roll.is_complete()]
            if found is not None or not open_rolls:
                return found if open_rolls else None
            most_s = LONGEST_PAUSE_S + 1e-4 * max(len(roll.witness.members) for roll in rolls)
            time.sleep(min(most_s, max(1e-4, waited_s / 4)))
    except KeyboardInterrupt:
        for roll in open_rolls:
            roll.leave()
        raise


def _what_is_wrong(rolls: list[_Roll], what: str, waited_s: float) -> str | None:
    """Why the open ``rolls`` will not become complete, None if that is not known."""
    rolls[0].watchdog.publish()
    for roll in rolls:
        witness, watchdog = roll.witness, roll.watchdog
        witness.stop_if_failed(what)
        me = f"rank {watchdog.rank}"
        strays = roll.strays()
        if strays:
            return (
                f"{me} calls {what}, which all of ranks {list(witness.members)} must call; but"
                f"{watchdog.table(strays)}\n{me} has sent nothing, and the others can go on."
            )
        if waited_s > witness.timeout_s:
            return (
                f"{me} has called {what}, which all of ranks {list(witness.members)} must call, "
                f"and has waited for the group's timeout of {witness.timeout_s:g} s; the others:"
                f"{watchdog.table(witness.members)}\n{me} has sent nothing."
            )
    return None
