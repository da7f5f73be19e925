# SPDX-License-Identifier: Apache-2.0
"""Processes as a launcher starts them, kept for the tests of a file, to run functions on demand."""

import contextlib
import functools
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from support.layouts import choose_defaults
from support.limits import ANSWER_S, PEERS_S

CALLS_OF_PROCESSES = 40
TIMEOUT = timedelta(seconds=PEERS_S)
# The last is what the first step of any optimizer of torch's loads: half a second in each rank.
PRELOADED = [
    "hypothesis",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "fullshard.torch",
    "torch._dynamo",
]


class World:
    """``ranks`` processes that call functions, which must be importable by name, of tests too.

    `run` gives a function the group of the first ranks among all that have joined, `run_joined` a
    default group of so many ranks, and with `launch` it finds a launcher's environment and joins by
    itself. Ranks stay joined between calls of the same kind. With ``drop_in`` they find fullshard
    in ``torch.distributed.fsdp``. Processes start with the first call, and anew after one that has
    left a rank without an answer.
    """

    def __init__(self, ranks=4, *, drop_in=False):
        self._ranks, self._drop_in = ranks, drop_in
        self._pipes, self._processes = [], []
        self._store = None
        self._joined = 0  # so many ranks
        self._calls = 0  # of these processes

    def run(self, size, function, /, *args, **kwargs):
        """Return what ``function(group, *args, **kwargs)`` does on each of ``size`` ranks."""
        self._join(self._ranks)
        return self._call(size, _in_group, (size, self._calls), function, args, kwargs)

    def run_joined(self, size, function, /, *args, **kwargs):
        """Return what ``function(*args, **kwargs)`` does where a world of ``size`` is joined."""
        self._join(size)
        return self._call(size, _as_joined, self._calls, function, args, kwargs)

    def launch(self, size, function, /, *args, **kwargs):
        """The same on ranks that nobody has joined, and that have left at the end."""
        self._leave()
        return self._call(size, _launched, self._environment(size), function, args, kwargs)

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._pipes, self._processes, self._joined, self._calls = [], [], 0, 0

    def _join(self, size):
        # Groups that functions have made go with their processes: on Gloo each has a thread that
        # wakes all the time. To leave would not do: torch keeps meshes of groups that are gone.
        self._calls += 1
        if self._calls > CALLS_OF_PROCESSES:
            self._kill()
        if self._joined != size:
            self._leave()
            groups = range(2, size + 1) if size == self._ranks else ()
            try:
                self._call(size, _join, self._environment(size), groups)
            except RuntimeError:  # a rank is still in another world: all start anew
                self._kill()
                self._call(size, _join, self._environment(size), groups)
            self._joined = size

    def _leave(self):
        joined, self._joined = self._joined, 0
        if joined:
            try:
                self._call(joined, _leave)
            except RuntimeError:  # somebody cannot: all start anew
                self._kill()

    def _environment(self, size):
        # As in torchrun the launching process holds the store, a new one for each start.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        values = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RUN_ID": "tests",
        }
        return {name: str(value) for name, value in values.items()}

    def _call(self, size, function, *args, **kwargs):
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes[:size]:
                pipe.send((function, args, kwargs))
            answers = [self._answer(rank) for rank in range(size)]
        except BaseException:  # what a rank may still say must not answer the next call
            self._kill()
            raise
        failures = [text for ok, text in answers if not ok]
        if failures:
            with contextlib.suppress(RuntimeError):  # ranks may be in the middle of something
                self._leave()
            raise RuntimeError("a rank failed:\n" + "\n".join(failures))
        return [result for _, result in answers]

    def _kill(self):
        for process in self._processes:
            process.kill()
        self.close()

    def _answer(self, rank):
        if not self._pipes[rank].poll(ANSWER_S):
            raise RuntimeError(f"rank {rank} has not answered for {ANSWER_S:.0f} s")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            raise RuntimeError(f"the process of rank {rank} has ended") from None

    def _start(self):
        context = ranks_context()
        for rank in range(self._ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, self._drop_in, there, list(sys.path)), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)


def on_processes(size, *, joined=False):
    """Run the test on processes of ``gloo_world``, with their process group first.

    ``size`` is a number, or the name of the test's own parameter that has it. With ``joined`` the
    processes are all of the world, and the test gets no group.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(gloo_world, **values):
            ranks = values[size] if isinstance(size, str) else size
            (gloo_world.run_joined if joined else gloo_world.run)(ranks, run, **values)

        world = inspect.Parameter("gloo_world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = list(inspect.signature(test).parameters.values())[not joined :]
        run.__signature__ = inspect.Signature([world, *others])  # what pytest fills in
        run.on_rank = test
        return run

    return decorate


def ranks_context():
    """Return a multiprocessing context whose processes are forked from one that imports torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def call_in_environment(rank, environment, function, *arguments):
    """Call ``function`` as in a process that has just been started, and does not fork from one."""
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *arguments)


def run_script(path, arguments=(), folder="."):
    """Run the script in ``folder`` and return what it prints."""
    printed = io.StringIO()
    sys.argv = [str(path), *map(str, arguments)]
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def home_of(module, name):
    """Return the module in which what a script imports from ``module`` is defined."""
    return getattr(importlib.import_module(module), name).__module__


def without_warnings(function, *args, **kwargs):
    """Call a function of others, which warn about their own ways."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def loopback():
    """Return the name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


# ---- in the processes ----------------------------------------------------------------------------

_groups = {}  # of the ranks that have joined, by size


def _rank_main(rank, drop_in, pipe, path):
    sys.path[:] = path
    tests = sys.modules["tests"] = ModuleType("tests")  # as pytest imports the tests themselves
    tests.__path__ = [str(Path(__file__).parents[1])]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    # The server that ranks are forked from keeps what was set for the test that started it.
    os.environ.pop("FULLSHARD_CHECK_VALUES", None)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.distributed_c10d.default_pg_timeout = TIMEOUT
    if drop_in:
        without_warnings(importlib.import_module, "fullshard.drop_in")
    choose_defaults()
    gc.freeze()  # what is imported is no garbage, and to look through it takes a quarter second
    while True:
        try:
            function, args, kwargs = pipe.recv()
            answer = (True, function(*args, **kwargs))
        except EOFError:
            break
        except (Exception, SystemExit):
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
    os._exit(0)  # whatever a failure has left running


def _join(environment, sizes):
    os.environ.update(environment)
    dist.init_process_group("gloo")
    _groups.update({size: dist.new_group(range(size), timeout=TIMEOUT) for size in sizes})


def _leave():
    _groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # what a function has imported


def _of_a_rank(function):
    return getattr(function, "on_rank", function)


def _name_groups_alike(call):
    # Groups are named by a count of each rank's own: a call on fewer ranks, or one that failed in
    # the middle, must not let the next call's ranks wait for each other under different names.
    dist.distributed_c10d._world.group_count = 1000 * (call + 1)


def _as_joined(call, function, args, kwargs):
    _name_groups_alike(call)
    return _of_a_rank(function)(*args, **kwargs)


def _in_group(numbers, function, args, kwargs):
    size, call = numbers
    _name_groups_alike(call)
    # Each rank has a generator of its own, which has drawn what its worlds wanted.
    os.environ["FULLSHARD_CHECK_VALUES"] = "0"
    try:
        return _of_a_rank(function)(_groups[size], *args, **kwargs)
    finally:
        del os.environ["FULLSHARD_CHECK_VALUES"]


def _launched(environment, function, args, kwargs):
    os.environ.update(environment)
    try:
        return _of_a_rank(function)(*args, **kwargs)
    finally:
        _leave()
