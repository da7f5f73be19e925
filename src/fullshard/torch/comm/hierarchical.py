# SPDX-License-Identifier: Apache-2.0
"""A communicator in two stages, so that nothing crosses the link between hosts twice.

[Note: Two stages]
A direct exchange among the N = H x L ranks of H hosts sends each slice of a gather over the link L
times, to every rank of another host. Here ranks with equal numbers on their hosts exchange first,
and ranks of one host then pass on to each other what came. A reduce goes the other way: the ranks
of a host add up their parts, and only that sum crosses. So a host sends (H-1)/H of a full buffer,
not L times that; a rank still sends (N-1)/N.

[Note: Order of sums]
A reduce adds within each host in rank order, and these sums in the order of hosts:
(r0 + r1) + (r2 + r3), where the direct exchange does ((r0 + r1) + r2) + r3. Rounding differs, but
is as reproducible. Low precision is accumulated in fp32 in both stages; a host's sum is rounded to
the buffer's dtype, in which it crosses the link.

[Note: A thread between the stages]
A rank's second stage sends what others wait for, so it must not depend on when this rank's program
next comes by. A thread for each communicator waits for first stages, in the order of the calls, and
issues the second ones. It waits for nothing but first stages, which programs issue without waiting:
take the earliest call that never completes; all ranks issue it, as a rank that does not would wait
for an earlier one; so its first stage completes on all ranks, as do those before it, and all
threads issue its second stage. Gathers and reduces have channels of their own, since messages on
one channel are told apart by the order of calls.
"""

import hashlib
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.process_group import ProcessGroupComm, witness_of
from fullshard.torch.comm.protocol import Comm, Full, Parts, Work, WrappedComm, flat_of
from fullshard.torch.comm.sibling_groups import backend_of, sibling_group
from fullshard.torch.comm.watch.watchdog import Witness

PRETEND = "FULLSHARD_RANKS_PER_HOST"


def hierarchical_between_hosts(comm: ProcessGroupComm) -> Comm:
    """Wrap ``comm`` in two stages for host tensors if that spares the link between hosts.

    It does where Gloo carries them and ranks are consecutive by host, several on each of several.
    Hosts are told apart by their names. With ``FULLSHARD_RANKS_PER_HOST=n`` in the environment of
    all ranks each n consecutive ranks of the world count as a host instead, so 1 turns it off.
    Collective.
    """
    if comm.size < 4 or backend_of(comm.group, "cpu") != dist.Backend.GLOO:
        return comm
    digest = hashlib.blake2b(_host_name().encode(), digest_size=8).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    names = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.all_gather([(names, mine)], label="exchange of host names").wait()
    count = ranks_per_host(names.tolist())
    return HierarchicalComm(comm, count) if 1 < count < comm.size else comm


def ranks_per_host(hosts: Sequence[object]) -> int:
    """Return ranks per host if ``hosts``, by rank, are consecutive and equally many, else 1."""
    count = next((i for i, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    starts = hosts[::count]
    equal = len(starts) * count == len(hosts) and all(
        hosts[i] == starts[i // count] for i in range(len(hosts))
    )
    return count if equal and len(set(starts)) == len(starts) else 1


def _host_name() -> str:
    pretended = os.environ.get(PRETEND, "")
    if not pretended:
        return socket.gethostname()
    if not pretended.isdecimal() or int(pretended) < 1:
        raise ConfigurationError(f"{PRETEND} must be a number of ranks from 1, got {pretended!r}")
    return f"host {dist.get_rank() // int(pretended)}"


class HierarchicalComm(WrappedComm):
    """A communicator that gathers and reduces host tensors in two stages.

    All other calls go to ``wide``.

    ``wide`` is over H x ``ranks_per_host`` ranks, consecutive by host; those of a host need not be
    on one, tests pretend. See [Note: Two stages] and [Note: Order of sums].
    """

    def __init__(self, wide: Comm, ranks_per_host: int):
        if ranks_per_host < 1 or wide.size % ranks_per_host:
            raise ConfigurationError(
                f"ranks_per_host={ranks_per_host} must divide the {wide.size} ranks"
            )
        super().__init__(wide)
        self._per_host = ranks_per_host
        self._channels: dict[str, tuple[Comm, Comm]] = {}
        self._witness: Witness | None = witness_of(wide)
        self._calls: queue.SimpleQueue[_TwoStages | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def duplicate(self) -> "HierarchicalComm":
        return HierarchicalComm(self.inner.duplicate(), self._per_host)

    def block(self, size: int) -> Comm:
        """See `Comm.block`. Of two stages if it is over several whole hosts."""
        part = self.inner.block(size)
        if size > self._per_host and size % self._per_host == 0:
            return HierarchicalComm(part, self._per_host)
        return part

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        channels = self._channels_for("gathers", pairs)
        if channels is None:
            return super().all_gather(pairs, label)
        across, within = channels
        hosts, local = across.size, self.rank % self._per_host
        first, second = [], []
        for full, shard in pairs:
            slices = flat_of(full).view(hosts, self._per_host, shard.numel())
            first.append((slices[:, local], shard))
            second += [(of_host.flatten(), of_host[local]) for of_host in slices]
        what = label or "all_gather"
        return self._start(
            what,
            lambda: across.all_gather(first, f"{what} (between hosts)"),
            lambda: within.all_gather(second, f"{what} (within the host)"),
        )

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        """See `Comm.reduce_scatter`, and [Note: Order of sums]."""
        channels = self._channels_for("reduces", pairs)
        if channels is None:
            return super().reduce_scatter(pairs, label)
        across, within = channels
        first, second = [], []
        for shard, full in pairs:
            sums = flat_of(full).new_empty(across.size * shard.numel())
            of_hosts = flat_of(full).chunk(across.size)
            first += list(zip(sums.chunk(across.size), of_hosts, strict=True))
            second.append((shard, sums))
        what = label or "reduce_scatter"
        return self._start(
            what,
            lambda: within.reduce_scatter(first, f"{what} (within the host)"),
            lambda: across.reduce_scatter(second, f"{what} (between hosts)"),
        )

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Return the bytes of this host's sums, and of what its first stage receives for them."""
        if full.device.type != "cpu":
            return super().reduce_scratch_bytes(full)
        received = super().reduce_scratch_bytes(full) * self.size // (self.size - 1)
        return (received * (self._per_host - 1) + full.nbytes) // self._per_host

    def _channels_for(
        self, purpose: str, pairs: Sequence[tuple[Full, Full]]
    ) -> tuple[Comm, Comm] | None:
        """Return communicators across hosts and within this one, or None for a direct exchange.

        Collective the first time. Each purpose has its own; they are made when first needed, as
        reduces are not called where gathers are. Unequal slices are sent to each rank by who has
        them.
        """
        tensors = [each for pair in pairs for each in pair]
        if any(isinstance(each, Parts) or each.device.type != "cpu" for each in tensors):
            return None
        if purpose not in self._channels:
            host, local = divmod(self.rank, self._per_host)
            of_host = range(host * self._per_host, (host + 1) * self._per_host)
            equal = range(local, self.size, self._per_host)
            across = _subgroup(self.inner, equal, f"{purpose}-between-hosts-{local}")
            within = _subgroup(self.inner, of_host, f"{purpose}-within-host-{host}")
            self._channels[purpose] = across, within
        return self._channels[purpose]

    def _start(self, what: str, first: Callable[[], Work], second: Callable[[], Work]) -> Work:
        if self._witness is not None:
            self._witness.issues(what)
        stages = _TwoStages(first(), second)
        if self._thread is None:
            self._thread = threading.Thread(
                target=_advance_all, args=(self._calls,), name="fullshard stages", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._calls.put, None)
        self._calls.put(stages)
        return _StagedWork(what, self._witness, stages)


class _TwoStages:
    """A call in progress: the thread waits for its first stage and issues the second."""

    def __init__(self, first: Work, second: Callable[[], Work]):
        self._stages: tuple[Work, Callable[[], Work]] | None = (first, second)
        self._advanced = threading.Event()
        self._last: Work | None = None
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Wait for the first stage and issue the second."""
        assert self._stages is not None
        first, second = self._stages
        try:
            first.wait()
            self._last = second()
        except BaseException as error:  # raised where the call is waited for
            self.error = error
        self._stages = None  # lets go of buffers between the stages
        self._advanced.set()

    def wait(self) -> None:
        """Block until all is over; ``error`` tells what has failed."""
        self._advanced.wait()
        try:
            if self._last is not None:
                self._last.wait()
        except Exception as error:
            self.error = error

    def is_completed(self) -> bool:
        """True if ``wait()`` would not block."""
        if self._last is None or self.error is not None:
            return self._advanced.is_set()
        return self._last.is_completed()


class _StagedWork:
    """The `Work` of two stages."""

    def __init__(self, what: str, witness: Witness | None, stages: _TwoStages):
        self._what = what
        self._witness = witness
        self._stages = stages
        self.is_completed = stages.is_completed

    def wait(self) -> None:
        if self._witness is None:
            self._stages.wait()
        else:
            self._witness.waits(self._what, [cast(Any, self._stages)])
        if self._stages.error is not None:
            raise self._stages.error


def _advance_all(calls: "queue.SimpleQueue[_TwoStages | None]") -> None:
    """Advance calls, in the thread, until the communicator is gone."""
    with torch.no_grad():
        while (call := calls.get()) is not None:
            call.advance()
            del call


def _subgroup(wide: Any, ranks: Sequence[int], kind: str) -> Comm:
    """Make a communicator over some ranks of ``wide``; see `sibling_group`."""
    if not isinstance(wide, ProcessGroupComm):
        made: Comm = wide.subgroup(ranks)
        return made
    group = sibling_group(wide.group, [wide.members[rank] for rank in ranks], kind)
    part = ProcessGroupComm(group, wide.witness.family)
    part.witness = _Backstage(wide.witness)
    return part


class _Backstage(Witness):
    """A witness that only reports failures; the witness ``whole`` notes and counts the calls.

    The thread issues second stages at moments that differ between ranks; counted, they would make a
    roll call find ranks in different places. Of a failure it tells what all ranks are doing, as the
    cause may be on another host.
    """

    def __init__(self, whole: Witness):
        super().__init__(whole.family, whole.members, whole.timeout_s)

    def issues(self, what: str) -> None:
        self.stop_if_failed(what)

    def waits(self, what: str, works: Sequence[dist.Work]) -> None:
        self.stop_if_failed(what)
        begin = time.time()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self.failure(what, error, begin) from error
