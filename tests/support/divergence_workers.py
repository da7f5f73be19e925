# SPDX-License-Identifier: Apache-2.0
"""Worlds that come to a bad end: training in which one rank dies, hangs or goes its own way."""

import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from support.limits import PROCESS_S
from support.world import loopback
from torch import nn

from fullshard.report import recording
from fullshard.torch import fully_shard

RANKS = 3
TIMEOUT_S = 10.0
BAD_STEP = 2


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.order = [0, 1, 2, 3]
        self.before_block_2 = lambda: None
        self.chosen = 0  # the model that backward goes through, of two
        self.backward = torch.Tensor.backward

    def forward(self, x):
        for place, index in enumerate(self.order):
            if place == 2:
                self.before_block_2()
            x = self.blocks[index](x).relu()
        return x


def killed(model):
    model.before_block_2 = lambda: os.kill(os.getpid(), signal.SIGKILL)


def asleep(model):
    model.before_block_2 = lambda: time.sleep(300)


def other_order(model):
    model.order = [0, 2, 1, 3]


def left_out(model):
    model.order = [0, 1, 3]


def no_backward(model):
    model.backward = lambda loss: None


def other_model(model):
    model.chosen = 1


def fewer_batches(model):
    dist.destroy_process_group()  # as at the end of a script
    time.sleep(5)
    sys.exit()


# What goes wrong, and on which rank. Rank 0 keeps the store.
CASES = {
    "killed": (killed, 1),
    "killed with the store": (killed, 0),
    "asleep": (asleep, 1),
    "other order": (other_order, 1),
    "left out": (left_out, 1),
    "other order in debug mode": (other_order, 2),
    "fewer batches": (fewer_batches, 1),
    "no backward": (no_backward, 1),
    "other model": (other_model, 1),
}


def run_cases(folder, path):
    """Run every world at once in processes forked from this one, which has imported torch.

    Rank r of a case leaves ``folder/case-r.json`` when it ends by an exception.
    """
    sys.path[:] = path
    fork = multiprocessing.get_context("fork")
    processes = {
        (case, rank): fork.Process(target=_rank_main, args=(case, rank, folder))
        for case in CASES
        for rank in range(RANKS)
    }
    for process in processes.values():
        process.start()
    deadline = time.monotonic() + PROCESS_S / 2
    for (case, rank), process in processes.items():
        if CASES[case] != (asleep, rank):
            process.join(max(0.0, deadline - time.monotonic()))
    for process in processes.values():
        process.kill()
        process.join()


def _rank_main(case, rank, folder):
    if case.endswith("debug mode"):
        os.environ["FULLSHARD_DEBUG"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    torch.set_num_threads(1)
    step, begin = -1, time.monotonic()
    try:
        dist.init_process_group(
            "gloo",
            store=_store(case, rank, Path(folder)),
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        torch.manual_seed(0)
        model, *others = [Blocks() for _ in range(1 + (case == "other model"))]
        for each in (model, *others):
            each.order = [3] if case == "no backward" else each.order
            for block in each.blocks:
                fully_shard(block)
            fully_shard(each)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(Path(folder, case), model, optimizer):
            for step in range(BAD_STEP + 2):
                begin = time.monotonic()
                go_wrong, culprit = CASES[case]
                if step == BAD_STEP and rank == culprit:
                    go_wrong(model)
                losses = [each(torch.ones(2, 8)).sum() for each in (model, *others)]
                model.backward(losses[model.chosen])
                optimizer.step()
                optimizer.zero_grad()
    except Exception as error:
        ending = (step, time.monotonic() - begin, type(error).__name__, str(error))
        (Path(folder) / f"{case}-{rank}.json").write_text(json.dumps(ending))
        raise SystemExit(1) from None


def _store(case, rank, folder):
    """A TCP store in rank 0, on a port of its own."""
    told = folder / f"{case}.port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, RANKS, is_master=True, wait_for_workers=False)
        told.with_suffix(".new").write_text(str(store.port))
        told.with_suffix(".new").rename(told)
        return store
    while not told.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), RANKS, is_master=False)
