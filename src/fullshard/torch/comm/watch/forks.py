# SPDX-License-Identifier: Apache-2.0
"""Refusal of collectives in forked children, which would wait for ever.

A forked child has its parent's process groups, but none of the threads and sockets that they need;
nothing that it sends is answered.
"""

import os
import weakref

import torch.distributed as dist

from fullshard.core.errors import UsageError


class _Process:
    """This process, and the process group that it had when it was forked."""

    def __init__(self) -> None:
        self.pid: int = os.getpid()
        self.parent: int = self.pid
        self.inherited: weakref.ref[dist.ProcessGroup] | None = None

    def after_fork(self) -> None:
        """Note in a child where it comes from."""
        self.parent, self.pid = self.pid, os.getpid()
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is not None:
            self.inherited = weakref.ref(world)


this_process: _Process = _Process()
os.register_at_fork(after_in_child=this_process.after_fork)


def refuse_inherited_world(what: str) -> None:
    """Raise `UsageError` before ``what`` if the default process group is that of the parent."""
    inherited = this_process.inherited
    if inherited is not None and dist.is_initialized() and inherited() is dist.group.WORLD:
        raise forked(this_process.parent, what)


def forked(owner_pid: int, what: str) -> UsageError:
    """Return what is raised before ``what``, which belongs to process ``owner_pid``."""
    return UsageError(
        f"process {this_process.pid} was forked from process {owner_pid} and cannot communicate in "
        f"its place, so {what} would wait for ever. Do it before forking, and hand plain tensors "
        "to workers of a DataLoader and to multiprocessing (param.full_tensor(), on all ranks); a "
        "child that is to be a rank of its own must be started by spawn, or initialise its own "
        "process group"
    )
