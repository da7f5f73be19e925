# SPDX-License-Identifier: Apache-2.0
"""Two processes with torchrun's environment that run whole scripts, one after the other.

With ``drop_in`` the scripts find fullshard in ``torch.distributed.fsdp``, else PyTorch itself.
"""

import contextlib
import importlib
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

WORLD = 2
TIMEOUT = timedelta(seconds=20)  # a rank whose peer has failed fails too, instead of waiting


class ScriptWorld:
    """Runs ``commands``, by name a list of a script's path and its arguments.

    `outputs` waits for them: by name whether it went well, and what rank 0 printed or what failed.
    """

    def __init__(self, commands, *, drop_in):
        self._names = list(commands)
        self._engine = "fullshard.torch.fsdp2.fully_shard" if drop_in else "torch.distributed.fsdp"
        # As with torchrun the launching process holds the store, a fresh one for each script.
        self._stores = [
            dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
            for _ in commands
        ]
        ports = [store.port for store in self._stores]
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, ports, drop_in, list(commands.values()), there, list(sys.path)),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def outputs(self):
        assert [pipe.recv() for pipe in self._pipes] == [self._engine] * WORLD
        answers = {name: _together(map(_next_answer, self._pipes)) for name in self._names}
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        return answers


def _next_answer(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return False, "the process has ended"


def _together(answers):
    answers = list(answers)
    failures = [text for ok, text in answers if not ok]
    return (False, "\n".join(failures)) if failures else answers[0]


def _rank_main(rank, ports, drop_in, commands, pipe, path):
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # PyTorch's, about its own ways
    if drop_in:
        importlib.import_module("fullshard.drop_in")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD),
        LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.distributed_c10d.default_pg_timeout = TIMEOUT
    pipe.send(importlib.import_module("torch.distributed.fsdp").fully_shard.__module__)
    for port, (script, *arguments) in zip(ports, commands, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        pipe.send(_run(str(script), list(map(str, arguments))))
    os._exit(0)  # whatever a failure has left running


def _run(script, arguments):
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
        return True, printed.getvalue()
    except (Exception, SystemExit):
        return False, f"rank {os.environ['RANK']}: {traceback.format_exc()}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
