# SPDX-License-Identifier: Apache-2.0
"""``load_checkpoint``: a step of a run into models and optimizers, on any number of ranks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpoint, CheckpointRanks, RunFolder
from fullshard.checkpoint.conversion import change_of_kind, is_narrower
from fullshard.checkpoint.loading import Loading, Want
from fullshard.checkpoint.ranks import failure_text
from fullshard.checkpoint.reading.comparing import same_content
from fullshard.checkpoint.runs.folder import run_folder
from fullshard.checkpoint.session import Loaded, check_step
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
from fullshard.torch.checkpoint.saving import (
    RANDOM,
    call_all,
    comms_of,
    line_of,
    refuse_inside_forward,
    session_of,
)
from fullshard.torch.checkpoint.tensors import KnownBoxes, LocalPart, local_part
from fullshard.torch.checkpoint.values import decode, set_random_state
from fullshard.torch.unit.extensions import resting_bytes

_SHOWN = 5


@overload
def load_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    if_any: Literal[False] = False,
) -> Loaded: ...
@overload
def load_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    if_any: bool,
) -> Loaded | None: ...
@torch.no_grad()
def load_checkpoint(
    path: "str | os.PathLike[str] | RunFolder",
    model: Models,
    optimizer: Optimizers = None,
    *,
    step: int | None = None,
    strict: bool = True,
    fallback: bool = False,
    if_any: bool = False,
) -> Loaded | None:
    """Load the newest complete step of a run, or ``step``. Collective, as `save_checkpoint` is.

    Each rank reads what it holds and no more, and verifies every chunk of it. Nothing is changed
    before all ranks have verified all that they need. It does not matter on how many ranks, by
    which strategy, in which dtype or with which engine the step was saved; values are converted to
    the dtype that the model has. Saving goes on after the step that was loaded: steps behind it are
    warned of, and moved aside by the next save of this model.

    Args:
        path: the run's folder.
        model: as for `save_checkpoint`; the same names.
        optimizer: as for `save_checkpoint`, new or used. Its groups have the same parameters; their
            settings (learning rate, betas, ...) are loaded too, but for those that name the
            algorithm (``decoupled_weight_decay``, ``nesterov``, ``fused``, ...), which stay.
        strict: refuse a step that lacks a tensor of the models or has one that they lack, one of
            another kind of numbers, and numbers that overflow.
        fallback: take the step before if one is damaged, with a warning, instead of raising.
        if_any: return None, and change nothing, if there is no step yet.

    Raises:
        CheckpointError: on all ranks: there is no such step, it is damaged, or does not fit.
        ConfigurationError: a path or step that is none.
        UsageError: called on some ranks only, or while a forward runs.
    """
    run = run_folder(path)
    if step is not None:
        check_step(step)
    models, optimizers = by_key(model, "model"), by_key(optimizer, "optimizer")
    refuse_inside_forward(models, "load_checkpoint()")
    call_all(comms_of(list(models.values())), "load_checkpoint()")
    session = session_of(list(models.values()))

    def prepare(checkpoint: Checkpoint) -> _ModelDelivery:
        return _ModelDelivery(checkpoint, models, optimizers, strict, session.ranks)

    return session.load(run, step, prepare, fallback, line_of(models), if_any)


class _ModelDelivery:
    """The tensors that one rank loads, and where they go."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        strict: bool,
        ranks: CheckpointRanks,
    ):
        self._checkpoint = checkpoint
        self._strict = strict
        self._done: set[str] = set()
        self._converted: list[str] = []
        self._state = decode(checkpoint.manifest.state) or {}
        self._extra = decode(checkpoint.manifest.extra)
        self._targets: list[tuple[str, LocalPart]] = []
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

        self.wants = [self._want(*target) for target in enumerate(self._targets)]

    def _want(self, number: int, target: tuple[str, LocalPart]) -> Want:
        name, part = target
        stored = self._checkpoint.stored(name).dtype
        if change := change_of_kind(name, stored, part.dtype, self._strict):
            self._converted.append(change)
        narrower = self._strict and is_narrower(stored, part.dtype)
        return Want(name, part.boxes, part.memory(stored), number, part.fresh, narrower)

    def look(self, want: Want, data: memoryview) -> None:
        """Take a part that is new, and refuse one with numbers that would be lost."""
        part = self._targets[want.key[0]][1]
        if want.inspect:
            part.refuse_lost(want.name, data, self._checkpoint.stored(want.name).dtype)
        if want.fresh:
            self._take(want, data)

    def receive(self, loading: Loading) -> None:
        """Put everything where it belongs. Raises `CheckpointError` that says what has changed."""
        try:
            for want, data in loading.deliver():
                self._take(want, data)
        except Exception as error:
            changed = ", ".join(sorted(self._done)) or "none"
            raise CheckpointError(
                f"{failure_text(error)}. Already loaded, on this rank: {changed}"
            ) from error

    def _take(self, want: Want, data: memoryview) -> None:
        number, start = want.key
        part = self._targets[number][1]
        if want.target is None:
            part.fill(start, data, self._checkpoint.stored(want.name).dtype)
        else:
            part.note_change()
        self._done.add(want.name)

    def finish(self, checkpoint: Checkpoint, newer: tuple[int, ...]) -> Loaded:
        """Attach new optimizer state, settings and extra state of modules."""
        settings = [line for optimizer in self._optimizers for line in optimizer.attach()]
        for module, name, value in self._values:
            module.get_submodule(name).set_extra_state(value)
        state = self._random
        return Loaded(
            checkpoint.step,
            self._extra,
            checkpoint.folder,
            checkpoint.manifest.world,
            tuple(self._missing),
            tuple(self._unexpected),
            newer,
            tuple(settings),
            tuple(self._converted),
            set_random_state=None if state is None else lambda: set_random_state(state),
        )

    def _plan_model(self, key: str, model: nn.Module, strict: bool) -> None:
        manifest = self._checkpoint.manifest
        partial = self._state.get("parts", {}).get(key) == "trainable weights"
        values = self._state.get("values", {})
        known: dict[int, str] = {}
        lacking: dict[str, int] = {}
        for name, value in entries_of_model(model).items():
            full = f"{key}/{name}"
            if not isinstance(value, Tensor):  # extra state of a module
                if full in values:
                    path = name.removesuffix("_extra_state").removesuffix(".")
                    self._values.append((model, path, values[full]))
                else:
                    self._missing.append(full)
                continue
            stored = manifest.tensor(full)
            if stored is None:
                frozen = isinstance(value, nn.Parameter) and not value.requires_grad
                if not (partial and frozen):
                    lacking[full] = identity(value)
                continue
            self._known.append(full)
            resting = resting_bytes(value)
            here = (resting,) if resting else tuple(value.shape)
            if stored.shape != here:
                raise CheckpointError(
                    f"{full!r} has shape {stored.shape} in it and {here} in the model", tensor=full
                )
            first = known.setdefault(identity(value), full)
            if first == full:  # tied values: once
                self._targets.append((full, local_part(full, value, self._boxes)))
            elif strict:
                self._check_tied(first, full)
        # Some files have tied values under one of their names.
        self._missing += [full for full, value in lacking.items() if value not in known]

    def _check_tied(self, first: str, other: str) -> None:
        manifest = self._checkpoint.manifest
        apart = manifest.tensor(first) is not manifest.tensor(other)
        if apart and not same_content(self._checkpoint, first, other):
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

    def _plan_random(self, ranks: CheckpointRanks) -> Tensor | None:
        """Memory for this rank's random state; those of ranks that are no more are only read."""
        own = None
        for name, stored in self._checkpoint.manifest.tensors.items():
            kind, _, text = name.partition("/")
            if kind != RANDOM or not (text.isascii() and text.isdecimal() and len(text) < 9):
                continue
            number = int(text)
            if (
                number % ranks.size == ranks.rank
                and stored.dtype == "U8"
                and len(stored.shape) == 1
            ):
                value = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
                own = value if number == ranks.rank else own
                self._targets.append((name, replace(local_part(name, value), fresh=True)))
        return own


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
