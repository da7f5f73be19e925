# SPDX-License-Identifier: Apache-2.0
"""Processes that run functions and scripts as torchrun would: each time as a new set of ranks."""

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

LARGEST = 4
TIMEOUT = timedelta(seconds=20)  # a rank whose peer has failed fails too, instead of waiting


class LaunchedWorld:
    """Calls functions in some of four processes, each with a launcher's environment.

    `run` lets them join and leave by themselves, `run_joined` keeps ranks joined between calls of
    one size, which is faster. Functions must be importable by name (put them into
    ``tests/support``).
    """

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(LARGEST):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, there, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._store = None
        self._joined = 0  # so many ranks

    def run(self, size, function, *args):
        """What ``function(*args)`` returns on each of ``size`` ranks that nobody has joined."""
        answers = self._answers(size, False, function, args)
        self._joined = 0
        return _results(answers)

    def run_joined(self, size, function, *args):
        """The same in a process group of ``size``."""
        answers = self._answers(size, True, function, args)
        self._joined = size if all(ok for ok, _ in answers) else 0
        return _results(answers)

    def _answers(self, size, join, function, args):
        afresh = not join or self._joined != size
        if afresh:
            for pipe in self._pipes[: self._joined]:
                pipe.send((None, False, dist.destroy_process_group, ()))
            _results([pipe.recv() for pipe in self._pipes[: self._joined]])
            # As in torchrun the launching process holds the store, a new one for each start.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        for pipe in self._pipes[:size]:
            pipe.send((environment if afresh else None, join, function, args))
        return [pipe.recv() for pipe in self._pipes[:size]]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _results(answers):
    failures = [text for ok, text in answers if not ok]
    if failures:
        raise RuntimeError("a rank failed:\n" + "\n".join(failures))
    return [result for _, result in answers]


def run_script(path, arguments, folder):
    """Run the script in ``folder``; what it prints."""
    printed = io.StringIO()
    sys.argv = [path, *arguments]
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _rank_main(rank, pipe, path):
    sys.path[:] = path
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.distributed_c10d.default_pg_timeout = TIMEOUT
    while True:
        try:
            environment, stay, function, args = pipe.recv()
            if environment is not None:
                if dist.is_initialized():  # another rank has failed before
                    dist.destroy_process_group()
                own = {"RANK": rank, "LOCAL_RANK": rank, **environment}
                os.environ.update({name: str(value) for name, value in own.items()})
                if stay:
                    dist.init_process_group("gloo")
            answer = (True, function(*args))
        except EOFError:
            break
        except Exception:
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        if dist.is_initialized() and not (stay and answer[0]):
            dist.destroy_process_group()
        pipe.send(answer)
