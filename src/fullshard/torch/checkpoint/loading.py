# SPDX-License-Identifier: Apache-2.0
"""``load_checkpoint``: a step of a run into models and optimizers, on any number of ranks."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpoint, Ranks, RunFolder, StepFolder
from fullshard.checkpoint.commit import mark_verified
from fullshard.checkpoint.loading import Loading, Want
from fullshard.checkpoint.ranks import agree, failure_text
from fullshard.checkpoint.rewriting import same_content
from fullshard.checkpoint.run_folder import load_newest, run_folder
from fullshard.core.errors import CheckpointError
from fullshard.torch.checkpoint.collecting import (
    Models,
    Optimizers,
    by_key,
    entries_of_model,
    identity,
    names_of_parameters,
)
from fullshard.torch.checkpoint.optimizers import OptimizerLoad
from fullshard.torch.checkpoint.ranks import call_all, comms_of
from fullshard.torch.checkpoint.saving import RANDOM, session_of
from fullshard.torch.checkpoint.tensors import Held, KnownBoxes, held_here
from fullshard.torch.checkpoint.values import decode, random_state_of, set_random_state

__all__ = ["Loaded", "load_checkpoint"]

_SHOWN = 5


@dataclass(frozen=True)
class Loaded:
    """A loaded step: everything found beside models and optimizers.

    ``missing``: tensors of the models that the step has not, ``unexpected``: those that only the
    step has; both are empty with ``strict``. ``world`` is the number of ranks that saved it.
    """

    step: int
    extra: Any
    folder: Path
    world: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    random_state: Mapping[str, Any] | None = field(default=None, repr=False)

    def restore_random_state(self) -> bool:
        """Let this rank's generators go on where those of the same rank were.

        False, and nothing is changed, if the step was saved on fewer ranks than this one's number.
        """
        if self.random_state is None:
            return False
        set_random_state(self.random_state)
        return True


@torch.no_grad()
def load_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
) -> Loaded:
    """Load the newest complete step of a run, or ``step``. Collective, as `save_checkpoint` is.

    Each rank reads what it holds and no more, and verifies every chunk of it. Nothing is changed
    before all ranks have verified all that they need. It does not matter on how many ranks, by
    which strategy, in which dtype or with which engine the step was saved; values are converted to
    the dtype that the model has.

    Args:
        path: the run's folder.
        model: as for `save_checkpoint`; the same names.
        optimizer: as for `save_checkpoint`, new or used. Its groups have the same parameters; their
            settings (learning rate, ...) are loaded too.
        strict: refuse a step that lacks a tensor of the models, or has one that they lack.
        fallback: take the step before if one is damaged, with a warning, instead of raising.

    Raises:
        CheckpointError: on all ranks: there is no such step, it is damaged, or does not fit.
        UsageError: called on some ranks only.
    """
    models, optimizers = by_key(model, "model"), by_key(optimizer, "optimizer")
    call_all(comms_of(list(models.values())), "load_checkpoint()")
    session = session_of(list(models.values()))
    session.settle()
    run, ranks = run_folder(path), session.ranks

    def load(folder: StepFolder) -> Loaded:
        return _load(folder, run, models, optimizers, strict, ranks)

    return load_newest(run, step, ranks, fallback, load)


def _load(
    folder: StepFolder,
    run: RunFolder,
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    strict: bool,
    ranks: Ranks,
) -> Loaded:
    what = f"cannot load {folder.path}"
    failure: Exception | None = None
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = Checkpoint(folder.path, run.files)
    except Exception as error:
        failure = error
    agree(ranks, what, failure)
    assert checkpoint is not None
    first = ranks.broadcast(checkpoint.manifest.generation.encode()).decode()
    with ExitStack() as stack:
        try:
            _check_same(checkpoint, first)
            plan = _Plan(checkpoint, models, optimizers, strict, ranks)
            loading = stack.enter_context(Loading(checkpoint, plan.wants))
            loading.verify(plan.deliver)
        except Exception as error:
            failure = error
        agree(ranks, what, failure)
        done: list[str] = []
        try:
            for part, data in loading.deliver():
                plan.deliver(part, data)
                done.append(part.name)
        except Exception as error:
            changed = ", ".join(sorted(set(done))) or "none"
            failure = CheckpointError(
                f"{failure_text(error)}. Already loaded, on this rank: {changed}"
            )
        agree(ranks, f"{what}, of which a part is loaded", failure)
    plan.attach()
    if ranks.rank == 0 and plan.is_whole:
        mark_verified(run.files, folder.path)
    return plan.loaded()


def _check_same(checkpoint: Checkpoint, generation: str) -> None:
    if checkpoint.manifest.generation != generation:
        raise CheckpointError(
            f"{checkpoint.folder} is not the same here and on rank 0: a run folder must lie on a "
            "file system that all ranks share",
            file=str(checkpoint.folder),
        )


class _Plan:
    """The tensors that one rank loads, and where they go."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        strict: bool,
        ranks: Ranks,
    ):
        self._checkpoint = checkpoint
        self._state = decode(checkpoint.manifest.state) or {}
        self._extra = decode(checkpoint.manifest.extra)
        self._targets: list[tuple[str, Held]] = []
        self._boxes: KnownBoxes = {}
        self._known: list[str] = []  # all names of tensors that the models have
        self._missing: list[str] = []
        self._values: list[tuple[nn.Module, str, Any]] = []
        names: dict[int, str] = {}
        for key, model in models.items():
            names.update(names_of_parameters(key, model))
            self._plan_model(key, model, strict)
        self._optimizers = [
            self._plan_optimizer(key, optimizer, names) for key, optimizer in optimizers.items()
        ]
        self._random = self._plan_random(ranks)
        aliases = checkpoint.manifest.aliases
        wanted = {aliases.get(name, name) for name in self._known}
        wanted |= {aliases.get(name, name) for name, _ in self._targets}
        parts = {*models, *optimizers}
        self._unexpected = sorted(
            name
            for name in checkpoint.manifest.tensors
            if name not in wanted and name.partition("/")[0] in parts
        )
        self.is_whole = all(
            name in wanted or name.startswith(f"{RANDOM}/") for name in checkpoint.manifest.tensors
        )
        if strict and (self._missing or self._unexpected):
            raise CheckpointError(
                f"it lacks {_some(self._missing)} of the model, and has {_some(self._unexpected)} "
                "that the model lacks; load into what was saved, or pass strict=False",
                tensor=(self._missing or self._unexpected)[0],
            )

    @property
    def wants(self) -> list[Want]:
        """All reads, one for each tensor."""
        wants = []
        for number, (name, held) in enumerate(self._targets):
            stored = self._checkpoint.stored(name)
            target = held.memory(stored.dtype)
            wants.append(Want(name, held.boxes, target, number, held.fresh))
        return wants

    def deliver(self, part: Want, data: memoryview) -> None:
        """Put what was read where it belongs."""
        number, start = part.key
        held = self._targets[number][1]
        if part.target is None:
            held.fill(start, data, self._checkpoint.stored(part.name).dtype)
        else:
            held.note_change()

    def attach(self) -> None:
        """Attach new optimizer state, settings and extra state of modules."""
        for optimizer in self._optimizers:
            optimizer.attach()
        for module, name, value in self._values:
            module.get_submodule(name).set_extra_state(value)

    def loaded(self) -> Loaded:
        """For the caller."""
        manifest = self._checkpoint.manifest
        return Loaded(
            manifest.step,
            self._extra,
            self._checkpoint.folder,
            manifest.world,
            tuple(self._missing),
            tuple(self._unexpected),
            random_state_of(self._random) if self._random is not None else None,
        )

    def _plan_model(self, key: str, model: nn.Module, strict: bool) -> None:
        manifest = self._checkpoint.manifest
        partial = self._state.get("parts", {}).get(key) == "trainable weights"
        known: dict[int, str] = {}
        for name, value in entries_of_model(model).items():
            full = f"{key}/{name}"
            if not isinstance(value, Tensor):
                self._plan_value(model, full, name)
                continue
            stored = manifest.tensor(full)
            if stored is None:
                frozen = isinstance(value, nn.Parameter) and not value.requires_grad
                if not (partial and frozen):
                    self._missing.append(full)
                continue
            self._known.append(full)
            self._check_shape(full, stored.shape, tuple(value.shape))
            first = known.setdefault(identity(value), full)
            if first == full:  # tied values: once
                self._targets.append((full, held_here(full, value, self._boxes)))
            elif strict:
                self._check_tied(first, full)

    def _plan_value(self, model: nn.Module, full: str, name: str) -> None:
        """Extra state of a module, which is no tensor."""
        values = self._state.get("values", {})
        if full not in values:
            self._missing.append(full)
            return
        path = name.removesuffix("_extra_state").removesuffix(".")
        self._values.append((model, path, values[full]))

    def _check_shape(self, name: str, stored: tuple[int, ...], here: tuple[int, ...]) -> None:
        if stored != here:
            raise CheckpointError(
                f"{name!r} has shape {stored} in it and {here} in the model", tensor=name
            )

    def _check_tied(self, first: str, other: str) -> None:
        manifest = self._checkpoint.manifest
        one, two = manifest.tensor(first), manifest.tensor(other)
        if one is not None and two is not None and one is not two and not same_content(one, two):
            raise CheckpointError(
                f"{first!r} and {other!r} are one tensor in the model and two in the step; load "
                "into a model in which they are not tied, or pass strict=False to take the first",
                tensor=other,
            )

    def _plan_optimizer(
        self, key: str, optimizer: Optimizer, names: Mapping[int, str]
    ) -> OptimizerLoad:
        told = self._state.get("optimizers", {}).get(key)
        if told is None:
            raise CheckpointError(
                f"it has no optimizer {key!r} (it has {sorted(self._state.get('parts', {}))}); "
                "load without an optimizer, or under the name with which it was saved"
            )
        planned = OptimizerLoad(self._checkpoint, key, optimizer, names, told)
        self._targets += planned.targets
        return planned

    def _plan_random(self, ranks: Ranks) -> Tensor | None:
        """Memory for this rank's random state; those of ranks that are no more are only read."""
        own = None
        for number in range(ranks.rank, self._checkpoint.manifest.world, ranks.size):
            name = f"{RANDOM}/{number}"
            stored = self._checkpoint.manifest.tensor(name)
            if stored is not None and stored.dtype == "U8" and len(stored.shape) == 1:
                value = torch.empty(stored.shape, dtype=torch.uint8)
                own = value if number == ranks.rank else own
                self._targets.append((name, replace(held_here(name, value), fresh=True)))
        return own


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
