# SPDX-License-Identifier: Apache-2.0
"""The state of one optimizer on its way back in: planned, filled, and attached at the end."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.checkpoint import Checkpoint
from fullshard.checkpoint.format.stored import StoredTensor
from fullshard.core.errors import CheckpointError
from fullshard.torch.checkpoint.collecting import name_of
from fullshard.torch.checkpoint.tensors import DTYPES, KnownBoxes, LocalPart, local_part
from fullshard.torch.state.apart import state_of_all
from fullshard.torch.state.owned import NUMBERS, catch_up, place_in
from fullshard.torch.state.tensor_classes import names_of_parts, put_together
from fullshard.torch.tensor.parameter import ShardedParameter


class OptimizerLoad:
    """The coming state of one optimizer.

    Nothing of it changes before `attach`, save the memory of state that is there already, which
    `targets` hands out.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        key: str,
        optimizer: Optimizer,
        names: Mapping[int, str],
        told: Mapping[str, Any],
    ):
        catch_up(optimizer)
        self._optimizer = optimizer
        self._key = key
        self._settings = _settings(checkpoint, key, optimizer, names, told)
        self._new: list[tuple[Tensor, dict[str, Any]]] = []
        self._boxes: KnownBoxes = {}
        self._targets: list[tuple[str, LocalPart]] = []
        self.unused: dict[str, dict[str, str]] = _stored_kinds(checkpoint, key)
        values = told["values"]
        self._of_all: dict[Any, Any] = dict(values.get("", {}))
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = name_of(param, names, key)
                stored_name = checkpoint.manifest.aliases.get(name, name)
                state = dict(values.get(stored_name, {}))
                stored = self.unused.pop(stored_name, {})
                for kind, value in state.items():
                    if names_of_parts(value):
                        state[kind] = self._put_together(checkpoint, param, kind, value, stored)
                for kind, full in stored.items():
                    state[kind] = self._prepare(checkpoint, group, param, kind, full)
                self._new.append((param, state))

    @property
    def targets(self) -> Iterator[tuple[str, LocalPart]]:
        """Tensors of the checkpoint and the memory that they belong into."""
        yield from self._targets

    def attach(self) -> list[str]:
        """Let the optimizer have what was filled, and its settings; tell those that differed."""
        told = []
        for number, (group, settings) in enumerate(
            zip(self._optimizer.param_groups, self._settings, strict=True)
        ):
            where = f"{self._key}, group {number}: "
            for name, value in settings.items():
                here = group.get(name)
                if _equal(here, value):
                    continue
                if name in _ALGORITHM or isinstance(here, bool) or isinstance(value, bool):
                    told.append(f"{where}{name} stays {here!r}, saved with {value!r}")
                else:
                    group[name] = value
                    told.append(f"{where}{name} is {value!r}, was {here!r}")
        for param, state in self._new:
            if state:
                self._optimizer.state[param] = state
            else:
                self._optimizer.state.pop(param, None)
        for key in state_of_all(self._optimizer):
            del self._optimizer.state[key]
        self._optimizer.state.update(self._of_all)
        return told

    def _put_together(
        self,
        checkpoint: Checkpoint,
        param: Tensor,
        kind: str,
        described: Mapping[str, Any],
        stored: dict[str, str],
    ) -> Tensor:
        """Memory for a value of a tensor class, whose parts are taken out of ``stored``."""
        cut = isinstance(param, ShardedParameter) and place_in(self._optimizer, param)
        if cut and cut.owner is None:
            raise CheckpointError(
                f"{kind!r} in {self._key!r} is a {described['class']}, which is never cut, and "
                f'{cut.name!r} is cut here; shard it with align="matrix", or load '
                "without the optimizer"
            )
        parts = []
        for part in names_of_parts(described):
            full = stored.pop(f"{kind}.{part}")
            held = checkpoint.stored(full)
            parts.append(torch.empty(held.shape, dtype=DTYPES[held.dtype], device=param.device))
            filled = local_part(full, parts[-1], self._boxes)
            self._targets.append((full, replace(filled, fresh=True)))
        return put_together(described, parts)

    def _prepare(
        self, checkpoint: Checkpoint, group: Mapping[str, Any], param: Tensor, kind: str, full: str
    ) -> Tensor:
        """Memory for one value: what is there, if it fits, else new."""
        stored = checkpoint.stored(full)
        there = self._optimizer.state.get(param, {}).get(kind)
        dtype = DTYPES[stored.dtype]
        if isinstance(there, Tensor) and tuple(there.shape) == stored.shape:
            value, fresh = there, False
        else:
            # As `Optimizer.load_state_dict`: a step count is on the host unless the device uses it.
            on_device = kind != "step" or group.get("capturable") or group.get("fused")
            device = param.device if on_device else torch.device("cpu")
            value, fresh = self._new_value(param, kind, stored, dtype, device), True
        held = local_part(full, value, self._boxes)
        self._targets.append((full, replace(held, fresh=fresh)))
        return value

    def _new_value(
        self,
        param: Tensor,
        kind: str,
        stored: StoredTensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        if stored.shape != tuple(param.shape) or kind in NUMBERS:
            return torch.empty(stored.shape, dtype=dtype, device=device)
        if isinstance(param, ShardedParameter):
            place = place_in(self._optimizer, param)
            local = param.local.new_empty(place.span.numel, dtype=dtype)
            return ShardedParameter.value(local, place)
        return torch.empty_like(param, dtype=dtype, requires_grad=False)


def _stored_kinds(checkpoint: Checkpoint, key: str) -> dict[str, dict[str, str]]:
    """For each parameter the tensors of its state: by kind the name in the checkpoint."""
    found: dict[str, dict[str, str]] = {}
    for full in checkpoint.manifest.tensors:
        owner, _, rest = full.partition("/")
        kind, _, name = rest.partition("/")
        if owner == key:
            found.setdefault(name, {})[kind] = full
    return found


def _settings(
    checkpoint: Checkpoint,
    key: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    told: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Find the settings of each group. Raises `CheckpointError` if groups do not fit."""
    _check_kind(key, optimizer, told)
    aliases = checkpoint.manifest.aliases
    mine = [
        {aliases.get(name, name) for name in (name_of(p, names, key) for p in group["params"])}
        for group in optimizer.param_groups
    ]
    theirs = [set(group["params"]) for group in told["groups"]]
    if mine != theirs:
        lacking = sorted(set().union(*mine) - set().union(*theirs))[:3]
        extra = sorted(set().union(*theirs) - set().union(*mine))[:3]
        raise CheckpointError(
            f"the groups of {key!r} have other parameters than when they were saved "
            f"({len(mine)} and {len(theirs)} groups; only here: {lacking}, only there: {extra}); "
            "make the optimizer as it was made then, or load without it"
        )
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in told["groups"]
    ]


# Settings that say which algorithm an optimizer is, or how it is carried out. They stay as they are
# here: with Adam's ``decoupled_weight_decay`` AdamW would be Adam.
_ALGORITHM = {"foreach", "fused", "capturable", "differentiable", "maximize", "nesterov"}
_ALGORITHM |= {"decoupled_weight_decay", "amsgrad", "centered", "adjust_lr_fn", "ns_coefficients"}
# Those with state of their own: it would be lacking, or left over.
_WITH_STATE = ("amsgrad", "centered")
_ADAM = {"Adam", "AdamW"}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):  # a learning rate may be one
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b) and type(a) is type(b)


def _check_kind(key: str, optimizer: Optimizer, told: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of optimizer; Adam and AdamW have equal state."""
    here, there = type(optimizer).__name__, told["class"]
    if there == "":  # it is not known of what was imported
        return
    kin = {kind.__name__ for kind in type(optimizer).__mro__}
    related = there in kin or bool(there in _ADAM and kin & _ADAM)
    settings = set().union(*told["groups"])
    lacking = sorted(set(optimizer.defaults) - settings - _ALGORITHM)
    of_torch = hasattr(torch.optim, there) or hasattr(torch.optim, here)
    if not related and (lacking or of_torch):
        why = (
            f", whose settings {', '.join(map(repr, lacking))} it does not have" if lacking else ""
        )
        raise CheckpointError(
            f"{key!r} was saved by {there} and is {here} here{why}; load without it, or make the "
            "optimizer that was saved"
        )
    for number, (mine, theirs) in enumerate(
        zip(optimizer.param_groups, told["groups"], strict=False)
    ):
        for name in _WITH_STATE:
            if name in theirs and bool(mine.get(name)) != bool(theirs[name]):
                raise CheckpointError(
                    f"{key!r} was saved with {name}={theirs[name]!r} in group {number}, and has "
                    f"{name}={mine.get(name)!r} here; make the optimizer that was saved, or load "
                    "without it"
                )
