# SPDX-License-Identifier: Apache-2.0
"""A run with a cause put in: trained by the real engine, and recorded as any run is.

Blocks sleep as long as they would compute. Ranks are threads over a link that lets bytes through at
a rate, one collective after the other, or processes on hosts of a `netlab`, over Gloo and TCP.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import netlab
import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.host_memory import resident_bytes
from fullshard.report import recording
from fullshard.report.findings import CAUSES
from fullshard.report.summary import report_of
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard, set_prefetch
from fullshard.torch.comm.protocol import WrappedComm

LIMIT = "fullshard.torch.inspection.run_record._limit_bytes"
HEALTHY = "healthy"


@dataclass
class Case:
    """A run; seconds are those of one step, of one block where ``compute_s`` is meant.

    ``cause`` is put in with ``cost_s``, on ``rank`` and in ``block`` (None: all of them), in each
    ``every``-th step. ``gather_s`` is what the link needs for one block. ``wrap`` is "blocks" or
    "root". ``sharded`` False is computation alone.
    """

    cause: str = HEALTHY
    ranks: int = 2
    blocks: int = 5
    width: int = 64
    compute_s: float = 8e-3
    gather_s: float = 1e-3
    latency_s: float = 0.0
    data_s: float = 1e-3
    save_s: float = 4e-3
    jitter: float = 0.03
    steps: int = 10
    rank: int | None = None
    block: int | None = None
    cost_s: float = 0.0
    prefetch: bool = True
    ahead: int = 1
    keep: bool = False  # full parameters from forward to backward
    wrap: str = "blocks"
    every: int = 1
    sharded: bool = True
    seed: int = 0

    @property
    def expected(self):
        """Cause, rank and unit that the verdict has to name."""
        unit = None if self.block is None else f"blocks.{self.block}"
        return self.cause, self.rank, "(root)" if self.wrap == "root" else unit


def cases_of(path):
    """Read cases from a JSON file. Raises `ConfigurationError` that says what is wrong where."""
    try:
        rows = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("expected a list of objects")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} holds no cases: {error}") from error
    return [_checked(f"{path}, case {number}", row) for number, row in enumerate(rows)]


def _checked(where, row):
    plain = asdict(Case())
    if unknown := row.keys() - plain.keys():
        raise ConfigurationError(
            f"{where}: {sorted(unknown)} is unknown; fields are {', '.join(plain)}"
        )
    for name, value in row.items():
        kinds = (int, type(None)) if name in ("rank", "block") else (type(plain[name]),)
        kinds = (*kinds, int) if kinds == (float,) else kinds
        negative = type(value) in (int, float) and not 0 <= value < 1e6 and name != "seed"
        if type(value) not in kinds or negative:
            raise ConfigurationError(f"{where}: {name} cannot be {value!r}")
    case = Case(**row)
    wrong = {
        "cause": case.cause not in (*CAUSES, HEALTHY),
        "wrap": case.wrap not in ("blocks", "root"),
        "rank": case.rank is not None and case.rank >= case.ranks,
        "block": case.block is not None and case.block >= case.blocks,
        "gather_s": case.gather_s <= 0,
        **{
            name: getattr(case, name) < 1 for name in ("ranks", "blocks", "width", "steps", "every")
        },
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ConfigurationError(f"{where}: {name} cannot be {getattr(case, name)!r}")
    return case


# ---- the machine --------------------------------------------------------------------------------


class Link:
    """A link that carries one collective after the other; times are of `time.perf_counter`."""

    def __init__(self, ranks, rate, latency_s):
        self._ranks, self._rate, self._latency_s = ranks, rate, latency_s
        self._lock, self._free_s = threading.Lock(), 0.0
        self._issued, self.done_s = {}, {}

    def issue(self, key, size):
        with self._lock:
            self._issued[key] = self._issued.get(key, 0) + 1
            if self._issued[key] == self._ranks:  # the last one
                begin = max(time.perf_counter(), self._free_s)
                self.done_s[key] = self._free_s = begin + self._latency_s + size / self._rate


class OverLink(WrappedComm):
    """A rank's communicator over a `Link`."""

    def __init__(self, inner, link, name="0"):
        super().__init__(inner)
        self._link, self._name = link, name
        self._calls = self._made = 0

    def duplicate(self):
        self._made += 1
        return OverLink(self.inner.duplicate(), self._link, f"{self._name}.{self._made}")

    def all_gather(self, pairs, label=""):
        size = sum(shard.nbytes for _, shard in pairs) * self.size
        return self._over(size, self.inner.all_gather, pairs, label)

    def reduce_scatter(self, pairs, label=""):
        size = sum(shard.nbytes for shard, _ in pairs) * self.size
        return self._over(size, self.inner.reduce_scatter, pairs, label)

    def _over(self, size, issue, pairs, label):
        self._calls += 1
        key = self._name, self._calls
        self._link.issue(key, size)  # first: who has waited for all ranks asks when it is done
        return Carried(issue(pairs, label), self._link, key)


class Carried:
    """A collective that is there when the link has carried it."""

    def __init__(self, work, link, key):
        self._work, self._link, self._key = work, link, key

    def wait(self):
        self._work.wait()
        time.sleep(max(0.0, self._link.done_s[self._key] - time.perf_counter()))

    def is_completed(self):
        done_s = self._link.done_s.get(self._key)
        return done_s is not None and time.perf_counter() >= done_s and self._work.is_completed()


class Sleep(torch.autograd.Function):
    """Passes on what comes, after a while, in both directions."""

    @staticmethod
    def forward(context, x, forward_s, backward_s):
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context, grad):
        time.sleep(context.backward_s)
        return grad.clone(), None, None


class Block(nn.Module):
    """A linear layer that needs as long as ``seconds()`` says for forward and backward."""

    def __init__(self, width, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds
        nn.init.eye_(self.linear.weight)  # random values would differ between threads
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return Sleep.apply(self.linear(x), *self.seconds())


class Model(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def seconds_of(case, rank, block, draw):
    """Return a function that says how long forward and backward of a block take on a rank."""
    slow = case.rank == rank and case.block in (None, block)
    more_s = case.cost_s / (case.blocks if case.block is None else 1) if slow else 0.0
    forward_s = more_s if case.cause == "slow rank in forward" else 0.0
    backward_s = more_s if case.cause == "slow rank in backward" else 0.0
    if case.cause == "slow rank":
        forward_s, backward_s = more_s * 0.4, more_s * 0.6

    def seconds():
        times = [case.compute_s * draw.gauss(1, case.jitter) * part for part in (1, 2)]
        return max(0.0, times[0]) + forward_s, max(0.0, times[1]) + backward_s

    return seconds


def sharded_model(case, rank, mesh, draw):
    """Make the model of a rank and shard it as the case says."""
    model = Model(
        Block(case.width, seconds_of(case, rank, number, draw)) for number in range(case.blocks)
    )
    if not case.sharded:
        return model
    blocks = [] if case.wrap == "root" else list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not case.keep)
    fully_shard(model, mesh=mesh)
    set_prefetch(model, case.ahead, case.ahead)
    for block in [] if case.prefetch else [*blocks, model]:
        block.set_modules_to_forward_prefetch([])
        block.set_modules_to_backward_prefetch([])
    return model


def train(case, rank, mesh, folder):
    """Train as one rank, with the cause put in; the record goes to ``folder``."""
    draw = random.Random(case.seed + rank)
    model = sharded_model(case, rank, mesh, draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(4, case.width)
    chosen, number = case.rank in (None, rank), 0

    def put_in(cause):
        due = chosen and case.cause == cause and number % case.every == case.every - 1
        time.sleep(case.cost_s if due else 0.0)

    with recording(folder, model, optimizer, detailed_every=2) as run:
        for number in range(case.steps):
            with run.span("data"):
                time.sleep(case.data_s)
                put_in("slow data")
            put_in("host-bound")
            if case.cause == "needless copies":
                with run.span("copy"):
                    put_in("needless copies")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 3 == 2:
                with run.span("checkpoint"):
                    time.sleep(case.save_s)
                    for _ in range(3):
                        put_in("checkpoint stall")


def reported(case, hosts=False):
    """Run a case, on hosts or as threads; return its report."""
    with tempfile.TemporaryDirectory() as folder:
        if hosts:
            on_hosts(case, folder)
        else:
            block_bytes = 4 * (case.width**2 + case.width)
            link = Link(case.ranks, block_bytes / case.gather_s, case.latency_s)
            with limited(case):
                LocalWorld(case.ranks).run(
                    lambda comm: train(case, comm.rank, OverLink(comm, link), folder)
                )
        return report_of(folder)


def limited(case):
    """Let recordings believe in a limit of memory: a near one, where that is the cause."""
    near = case.cause == "memory near its limit"
    return mock.patch(LIMIT, return_value=int(resident_bytes()[1] * (1.02 if near else 4)))


# ---- hosts --------------------------------------------------------------------------------------

SLOWER = 4  # times as long as threads' steps, so that Gloo and a busy machine weigh less
WIDTH, BURST_KB = 512, 128  # blocks of 1 MiB, of which a bucket holds back no large part
PORT = 29511


def for_hosts(case):
    """Return a drawn case as it runs on hosts; many small units stay as they are."""
    if case.latency_s:
        return replace(case, latency_s=0.0, gather_s=1e-4)
    times = ("compute_s", "gather_s", "data_s", "save_s", "cost_s")
    return replace(case, width=WIDTH, **{name: getattr(case, name) * SLOWER for name in times})


def on_hosts(case, folder):
    """Run a case with one process a host. Raises `netlab.Unavailable` where none can be had."""
    crossing = 4 * (case.width**2 + case.width) * (case.ranks - 1) / case.ranks
    rate_mbit = min(10_000, max(1, round(crossing * 8 / case.gather_s / 1e6)))
    with netlab.Netlab(case.ranks, rate_mbit, burst_kb=BURST_KB) as lab:
        for rank in range(case.ranks):
            options = ["--as-rank", str(rank), "--folder", folder]
            lab.start(rank, [sys.executable, __file__, *options, json.dumps(asdict(case))])
        lab.wait()


def main():
    parser = argparse.ArgumentParser(description="One rank of a run; started by diagnosis.py.")
    parser.add_argument("case", type=json.loads)
    parser.add_argument("--as-rank", type=int, required=True)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    case = Case(**options.case)
    torch.set_num_threads(1)
    store = f"tcp://{netlab.address(0)}:{PORT}"
    dist.init_process_group("gloo", init_method=store, rank=options.as_rank, world_size=case.ranks)
    with limited(case):
        train(case, options.as_rank, None, options.folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
