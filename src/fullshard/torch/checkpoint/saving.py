# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint``: models and optimizers into a run folder, now or while training goes on."""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import RunFolder, Saving
from fullshard.checkpoint.files import Files
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.ranks import CheckpointRanks, SoloRanks, packed, unpacked
from fullshard.checkpoint.runs.folder import run_folder
from fullshard.checkpoint.saving import versions_of
from fullshard.checkpoint.session import Content, SaveSession, check_step
from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.torch.checkpoint.collecting import Collected, Models, Optimizers, by_key, collect
from fullshard.torch.checkpoint.tensors import KnownBoxes, local_part, piece_of
from fullshard.torch.checkpoint.values import encode, random_state
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import broadcast_bytes, gather_bytes, share_bytes
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.step.managed import managed_units

_world: "weakref.WeakKeyDictionary[dist.ProcessGroup, Comm]" = weakref.WeakKeyDictionary()


class CommRanks:
    """Ranks that ``comms`` join: of a grid, its rows and then its columns.

    A rank's number is its place among the rows times their length and its place in its row.
    """

    def __init__(self, comms: Sequence[Comm]):
        self._comms = [_on_host(comm) for comm in comms]
        self._aside: CommRanks | None = None
        self.rank: int = 0
        self.size: int = 1
        for comm in self._comms:
            self.rank += self.size * comm.rank
            self.size *= comm.size

    def gather(self, data: bytes) -> list[bytes]:
        parts = [data]
        for comm in self._comms:
            joined = packed(parts)
            parts = [part for each in gather_bytes(comm, joined) for part in unpacked(each)]
        return parts if self.rank == 0 else []

    def broadcast(self, data: bytes) -> bytes:
        for comm in reversed(self._comms):
            data = broadcast_bytes(comm, data)
        return data

    def share(self, data: bytes) -> list[bytes]:
        if len(self._comms) == 1:
            return share_bytes(self._comms[0], data)
        return unpacked(self.broadcast(packed(self.gather(data))))

    def duplicate(self, run: Path, files: Files) -> "CommRanks":
        """See `fullshard.checkpoint.CheckpointRanks.duplicate`; one for all of this one's saves."""
        self._aside = self._aside or CommRanks(self._comms)
        return self._aside


def _on_host(comm: Comm) -> Comm:
    return comm.on_host() if isinstance(comm, ProcessGroupComm) else comm.duplicate()


def comms_of(models: Sequence[nn.Module]) -> list[Comm]:
    """The communicators that join all ranks of the models: none for one process."""
    units = [managed.unit for model in models for managed in managed_units(model)]
    found = {unit.ranks.joining for unit in units}
    cut_further = any(
        param.ownership.tensor_parallel is not None for unit in units for param in unit.sharded
    )
    if len(found) == 1 and not cut_further:
        return list(next(iter(found)))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    # Plain modules, or units that lie on several meshes: everybody.
    group = dist.group.WORLD
    assert group is not None
    if group not in _world:
        _world[group] = ProcessGroupComm(group)
    return [_world[group]]


def ranks_over(comms: Sequence[Comm]) -> CheckpointRanks:
    """New channels over ``comms``. Collective."""
    return CommRanks(comms) if comms else SoloRanks()


def call_all(comms: Sequence[Comm], what: str) -> None:
    """Wait until all ranks have called ``what``; see `call_roll`."""
    call_roll(list(comms), what, "call it on every rank: each writes and reads its part")


RANDOM = "random"  # tensors "random/<rank>": the state of that rank's generators


def _pinned_block(size_bytes: int) -> memoryview:
    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return memory.numpy().data


class CommSession(SaveSession):
    """The session of ranks that ``comms`` join, and the boxes of tensors that it knows."""

    def __init__(self, comms: Sequence[Comm]):
        super().__init__(ranks_over(comms))
        self.comms = comms
        self.boxes: KnownBoxes = {}


_sessions: "weakref.WeakKeyDictionary[Any, CommSession]" = weakref.WeakKeyDictionary()
_alone: CommSession | None = None
_making = threading.Lock()


def session_of(models: Sequence[nn.Module]) -> CommSession:
    """The session of the ranks of ``models``. Collective the first time."""
    global _alone
    comms = comms_of(models)
    if not comms:
        with _making:
            _alone = _alone or CommSession(())
        return _alone
    session = _sessions.get(comms[0])
    if session is None or list(session.comms) != comms:
        session = _sessions[comms[0]] = CommSession(comms)
    return session


@torch.no_grad()
def save_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int,
    extra: Any = None,
    asynchronous: bool = False,
    trainable_only: bool = False,
) -> Saving:
    """Write one step of a run: each rank its shards, complete and verified or not at all.

    Collective over the ranks of the models (all ranks of the default group for plain modules, of
    which those of rank 0 are written, as replicas are written once). The step can be seen when all
    ranks have written and flushed; an older one is not touched before that. The random state of
    every rank is stored too.

    Args:
        path: the run's folder, a `RunFolder` to say which steps are kept. It belongs to one run,
            and one process at a time saves there.
        model: behind either door or plain, or a mapping of several by name.
        optimizer: any torch optimizer over the parameters of the models, or a mapping.
        step: the step's number. Steps that do not lead to it (training went back, or another run
            has saved them) are moved into a folder ``aside-N``, never deleted.
        extra: what rank 0 wants to find again in ``load_checkpoint(...).extra``: numbers, texts,
            bytes, lists, tuples, dicts and small tensors. So the ``state_dict()`` of schedulers and
            of GradScaler, and the position in the data.
        asynchronous: return when the shards are copied to host memory; a thread writes. A failure
            is raised on all ranks by the next call here or by ``wait()``. A further save waits for
            the one before it.
        trainable_only: leave out frozen parameters, as of a model with LoRA adapters. Loading then
            leaves them as they are.

    Returns a `Saving`, whose ``wait()`` gives the step's folder.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; nothing is to be seen then.
        ConfigurationError: values that cannot be stored, an ``extra`` without the metric of
            `Keep`, a path or step that is none, before anything is written.
        UsageError: called on some ranks only, or while a forward runs.
    """
    run = run_folder(path)
    check_step(step)
    models, optimizers = by_key(model, "model"), by_key(optimizer, "optimizer")
    refuse_inside_forward(models, "save_checkpoint()")
    call_all(comms_of(list(models.values())), "save_checkpoint()")
    session = session_of(list(models.values()))

    def content() -> Content:
        collected = collect(models, optimizers, trainable_only, session.boxes)
        own = f"{RANDOM}/{session.ranks.rank}"
        collected.parts[own] = replace(local_part(own, random_state()), tile=None)
        pieces = [piece_of(name, part) for name, part in collected.parts.items()]
        pinned = any(part.local.is_cuda for part in collected.parts.values())
        about = _about(step, models, session.ranks.size, collected, extra)
        return Content(pieces, about, extra, _pinned_block if pinned else None)

    return session.save(run, step, content, asynchronous, line_of(models))


def refuse_inside_forward(models: Mapping[str, nn.Module], what: str) -> None:
    """Raise `UsageError` if the forward of one of the models' units runs. Not collective."""
    for key, model in models.items():
        for managed in managed_units(model):
            if managed.runs_forward:
                raise UsageError(
                    f"{what} was called while the forward of unit {managed.unit.name!r} of "
                    f"{key!r} runs; call it between steps"
                )


def line_of(models: Mapping[str, nn.Module]) -> nn.Module:
    """The object by which lines of steps are told apart: the first model."""
    if not models:
        raise ConfigurationError("there is no model to save or load: the mapping is empty")
    return next(iter(models.values()))


def _about(
    step: int, models: Mapping[str, nn.Module], world: int, collected: Collected, extra: Any
) -> About:
    return About(
        step,
        _layout_text(list(models.values()), world),
        versions_of("torch"),
        collected.aliases,
        encode(collected.state, "state"),
        encode(extra, "extra"),
    )


def _layout_text(models: Sequence[nn.Module], world: int) -> str:
    """Say for people how the models are sharded."""
    kinds = {
        "hybrid"
        if unit.ranks.gather.size > 1 and unit.ranks.replicas.size > 1
        else "sharded"
        if unit.ranks.gather.size > 1
        else "replicated"
        for model in models
        for unit in (managed.unit for managed in managed_units(model))
    }
    return f"fullshard.torch, {' and '.join(sorted(kinds)) or 'plain'} over {world} ranks"
