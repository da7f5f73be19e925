# SPDX-License-Identifier: Apache-2.0
"""Further process groups, which some ranks of a group make without the others."""

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_naming = threading.Lock()
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()

# [Note: Names agreed in silence]
# The ranks of a new group meet in the store under the group's name. `new_group` counts names up on
# all ranks of the world, so all must call it; with `use_local_synchronization` only the members do,
# but the name then hashes how many groups each of them knows, and they wait for each other forever
# when those numbers differ (torch 2.11 to 2.13). Ours is the parent's name, which its ranks share
# already, and how many siblings the parent has, which they count alike because making one is
# collective over the parent. `new_group` takes no name, so the function that makes it is replaced
# for the duration of the call. So is the one that looks for an NCCL communicator of the whole world
# to split: splitting is collective over the world.


def sibling_group(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    kind: str,
    backend: str | None = None,
    high_priority: bool = False,
) -> dist.ProcessGroup:
    """Make a process group over ``ranks`` (global) of ``parent``: its backends, options, timeout.

    ``backend`` names another one than the parent's, which gets no options. With ``high_priority``
    NCCL runs the group's collectives on streams of high priority, whatever the parent does, and
    there is no Gloo beside it.
    Collective over ``parent``; ranks may ask for different disjoint groups, of different ``kind``.
    """
    number = _made.get(parent, 0)
    _made[parent] = number + 1
    name = f"{parent.group_name}/{kind}/{number}"
    replacements = {
        "_process_group_name": lambda ranks, use_hashed_name: name,
        "_get_split_source": lambda group: None,
    }
    # torch sorts the ranks of a group unless told otherwise, and versions that always do have no
    # argument for it.
    backends = backend or dist.get_backend_config(parent)
    if high_priority:
        backends = without_host(backends)
    order: dict[str, Any] = {} if sorted(ranks) == list(ranks) else {"sort_ranks": False}
    with _naming, _replaced(replacements):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout_s_of(parent)),
            backend=backends,
            pg_options=None if backend else options_like(parent, high_priority=high_priority),
            use_local_synchronization=True,
            **order,
        )
    return group


def without_host(backends: str) -> str:
    """Leave Gloo out of ``cpu:gloo,cuda:nccl``: all would connect in host memory, too."""
    others = [each for each in backends.split(",") if not each.endswith(dist.Backend.GLOO)]
    return ",".join(others) or backends


def options_like(parent: dist.ProcessGroup, *, high_priority: bool = False) -> Any:
    """Return a copy of the options of ``parent``'s backend, for another group; None if it has none.

    Of a group with several backends those of the accelerator's: `new_group` takes only one, and
    Gloo's are never passed on. With ``high_priority`` the copy asks for streams of high priority.
    """
    for device in sorted(parent._device_types, key=lambda device: device.type == "cpu"):
        backend = parent._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it.
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)
        if options is None or backend.name() == dist.Backend.GLOO:
            continue
        try:
            options = copy.deepcopy(options)  # torch writes the group's name and ranks into it
        except TypeError:  # of a backend whose options nobody can copy
            continue
        if getattr(options, "split_from", None) is not None:
            options.split_from = None  # the new group is not split off what its parent was
        if high_priority and hasattr(options, "is_high_priority_stream"):
            options.is_high_priority_stream = True
        return options
    return None


def backend_of(group: dist.ProcessGroup, device: str | torch.device) -> str | None:
    """Return the name of the backend that carries tensors on ``device``, None if there is none."""
    try:
        return str(group._get_backend(torch.device(device)).name())
    except RuntimeError:
        return None


def timeout_s_of(group: dist.ProcessGroup) -> float:
    """Return the seconds after which the group gives up a collective."""
    options = group._get_backend(group._device_types[0]).options
    timeout = getattr(options, "_timeout", None) or dist.default_pg_timeout
    return float(timeout.total_seconds())


@contextmanager
def _replaced(functions: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(c10d, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(c10d, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(c10d, name, function)
