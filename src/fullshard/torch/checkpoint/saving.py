# SPDX-License-Identifier: Apache-2.0
"""``save_checkpoint``: models and optimizers into a run folder, now or while training goes on."""

import importlib.metadata
import os
import platform
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import Background, Ranks, RunFolder, Saving
from fullshard.checkpoint.background import save_in_background
from fullshard.checkpoint.run_folder import run_folder
from fullshard.checkpoint.saving import About, Plans, write_step
from fullshard.checkpoint.streaming import BLOCK_BYTES, Blocks, stream
from fullshard.core.errors import ConfigurationError
from fullshard.torch.checkpoint.collecting import (
    Collected,
    Models,
    Optimizers,
    by_key,
    collect,
)
from fullshard.torch.checkpoint.ranks import call_all, comms_of, ranks_over
from fullshard.torch.checkpoint.tensors import KnownBoxes, held_here, piece_of
from fullshard.torch.checkpoint.values import encode, random_state_tensor
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.step.managed import managed_units

__all__ = ["Session", "save_checkpoint", "session_of"]

RANDOM = "random"  # tensors "random/<rank>": the state of that rank's generators


class Session:
    """The memory of ranks that save together, from save to save."""

    def __init__(self, comms: Sequence[Comm]):
        self.comms = comms
        self.ranks = ranks_over(comms)
        self.aside: Ranks | None = None  # for the thread of asynchronous saves
        self.plans = Plans()
        self.boxes: KnownBoxes = {}
        self.blocks = Blocks(3 * BLOCK_BYTES)
        self.aside_blocks: tuple[int, Blocks] | None = None
        self.pending: Saving | None = None

    def settle(self) -> None:
        """Wait for a save that is under way. Raises its `CheckpointError`, once."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.wait()

    def blocks_of(self, background: Background, pinned: bool) -> Blocks:
        """Host memory for an asynchronous save, the same as last time if the bound is."""
        most = background.host_memory_bytes
        if self.aside_blocks is None or self.aside_blocks[0] != most:
            made = Blocks(most, _pinned_block) if pinned else Blocks(most)
            self.aside_blocks = most, made
        return self.aside_blocks[1]


def _pinned_block(size_bytes: int) -> memoryview:
    memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return memory.numpy().data


_sessions: "weakref.WeakKeyDictionary[Any, Session]" = weakref.WeakKeyDictionary()
_alone: Session | None = None
_making = threading.Lock()


def session_of(models: Sequence[nn.Module]) -> Session:
    """The session of the ranks of ``models``. Collective the first time."""
    global _alone
    comms = comms_of(models)
    if not comms:
        with _making:
            _alone = _alone or Session(())
        return _alone
    session = _sessions.get(comms[0])
    if session is None or list(session.comms) != comms:
        session = _sessions[comms[0]] = Session(comms)
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
        path: the run's folder, a `RunFolder` to say which steps are kept. It belongs to one run.
        model: behind either door or plain, or a mapping of several by name.
        optimizer: any torch optimizer over the parameters of the models, or a mapping.
        step: the step's number. A step that is there already stays until the new one is complete.
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
        ConfigurationError: values that cannot be stored, before anything is written.
        UsageError: called on some ranks only.
    """
    run = run_folder(path)
    if type(step) is not int or not 0 <= step < 10**18:
        raise ConfigurationError(f"step is a number from 0, got {step!r}")
    models, optimizers = by_key(model, "model"), by_key(optimizer, "optimizer")
    call_all(comms_of(list(models.values())), "save_checkpoint()")
    session = session_of(list(models.values()))
    session.settle()
    failure, mine, about, pinned = None, [], About(step), False
    try:
        collected = collect(models, optimizers, trainable_only, session.boxes)
        own = f"{RANDOM}/{session.ranks.rank}"
        collected.held[own] = held_here(own, random_state_tensor())
        mine = [piece_of(name, held) for name, held in collected.held.items()]
        pinned = any(held.local.is_cuda for held in collected.held.values())
        about = _about(step, models, session.ranks.size, collected, extra)
    except Exception as error:
        failure = error
    what = f"step {step} cannot be saved"
    mine = session.plans.mine(mine, session.ranks, what, failure)
    target = Path(run.path)
    if not asynchronous:
        folder = write_step(
            target,
            mine,
            about,
            session.ranks,
            run.files,
            run.keep,
            lambda pieces, writer: stream(pieces, writer, session.blocks),
        )
        return Saving.finished(step, folder)
    if session.aside is None:
        session.aside = session.ranks.duplicate()
    blocks = session.blocks_of(run.background, pinned)
    session.pending = save_in_background(
        target, mine, about, session.aside, run.files, blocks, run.keep
    )
    return session.pending


def _about(
    step: int, models: Mapping[str, nn.Module], world: int, collected: Collected, extra: Any
) -> About:
    return About(
        step,
        _layout_text(list(models.values()), world),
        _versions(),
        collected.aliases,
        encode(collected.state, "state"),
        encode(extra, "extra"),
    )


def _layout_text(models: Sequence[nn.Module], world: int) -> str:
    """How the models are sharded, for people."""
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


@cache
def _versions() -> dict[str, str]:
    return {
        "fullshard": importlib.metadata.version("fullshard"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
