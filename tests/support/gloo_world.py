# SPDX-License-Identifier: Apache-2.0
"""Four processes of one Gloo world, kept for the test session, that run functions on demand."""

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

SIZES = (2, 3, 4)
TIMEOUT = timedelta(seconds=20)  # a rank whose peer has failed fails too, instead of waiting


class GlooWorld:
    """``run(size, function, *args)`` calls ``function(group, *args)`` on the first ``size`` ranks.

    Functions must be importable by name (put them into ``tests/support``).
    """

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(max(SIZES)):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, rendezvous, there, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, size, function, *args, **kwargs):
        for pipe in self._pipes[:size]:
            pipe.send((size, function, args, kwargs))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        failures = [text for ok, text in answers if not ok]
        if failures:
            raise RuntimeError("a rank failed:\n" + "\n".join(failures))
        return [result for _, result in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _rank_main(rank, rendezvous, pipe, path):
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    # Each has a generator of its own, which has drawn what its worlds wanted.
    os.environ["FULLSHARD_CHECK_VALUES"] = "0"
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=max(SIZES),
        timeout=TIMEOUT,
    )
    groups = {size: dist.new_group(range(size), timeout=TIMEOUT) for size in SIZES}
    while True:
        try:
            size, function, args, kwargs = pipe.recv()
            answer = (True, function(groups[size], *args, **kwargs))
        except EOFError:
            break
        except Exception:
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
    dist.destroy_process_group()


def _loopback():
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
