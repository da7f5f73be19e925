# SPDX-License-Identifier: Apache-2.0
"""Two processes as a launcher starts them, in which training libraries run a list of cases.

With ``drop_in`` their ``torch.distributed.fsdp`` is fullshard's, else PyTorch's own. Not the
session's Gloo world: libraries keep global state, and what they have imported stays theirs.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from support.library_cases import CASES

WORLD = 2
TIMEOUT = timedelta(seconds=60)


class LibraryWorld:
    """Two fresh processes that run cases, named "library/case" as in `library_cases`.

    `start` has them call a function of `support.LIBRARY_training` for each case, `answers` waits
    for what it gave: by case for each rank whether it went well, and the answer or a text.
    """

    def __init__(self, *, drop_in, port):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, port, drop_in, there, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def start(self, function, names, folder):
        for pipe in self._pipes:
            pipe.send((function, list(names), str(folder)))

    def answers(self):
        ranks = [pipe.recv() for pipe in self._pipes]
        return {name: [each[name] for each in ranks] for name in ranks[0]}

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _rank_main(rank, port, drop_in, pipe, path):
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the libraries' own, about each other
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
    )
    dist.init_process_group("gloo", timeout=TIMEOUT)
    good = True
    while True:
        try:
            function, names, folder = pipe.recv()
        except EOFError:
            break
        answers = dict.fromkeys(names, (False, "not run, since a case before it failed"))
        for name in names:
            if good:  # else a rank may have left the other in the middle of something
                answers[name] = _answer(function, name, folder, drop_in)
                good = all(_over_ranks(answers[name][0]))
        pipe.send(answers)
    if good:
        dist.destroy_process_group()
    os._exit(0)  # whatever a failure has left running


def _answer(function, name, folder, drop_in):
    environment = dict(os.environ)
    library, case = name.split("/")
    try:
        if drop_in:
            importlib.import_module("fullshard.drop_in")
        training = importlib.import_module(f"support.{library}_training")
        gc.freeze()  # Accelerate collects garbage often, of which imported modules are none
        folder = os.path.join(folder, f"{library}-{case}")
        return True, getattr(training, function)(CASES[library][case], folder)
    except Exception:
        return False, traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _over_ranks(ok):
    everyone = [None] * WORLD
    try:
        dist.all_gather_object(everyone, ok)
    except Exception:  # the other is stuck, or the group is gone
        return [False]
    return everyone
