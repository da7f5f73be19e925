# SPDX-License-Identifier: Apache-2.0
"""Steps of whole-matrix optimizers over parameters that stay cut: each has an owner for a step.

[Note: An exchange]
Ranks send the owner of a parameter their parts of its gradient, those of a unit in one call; it
steps, keeps the new values and sends all ranks their parts of them. So a step sends
2 (N - 1) / N of the parameters' bytes. One unit is stepped while gradients of the next and new
values of the one before travel. State rests whole with the owner, as over ``align="matrix"``; what
was loaded, cut, goes to the owner with the first gradient.

[Note: A vote on kept values]
Values that an owner has kept are right unless somebody wrote the parameter since, as by loading a
checkpoint, on whichever rank. No count of writes would do: one belongs to a unit, which other
optimizers step, and not all ways to write count. So each rank compares a checksum of its parts, as
the last step left them, with one of now, and tells all in one element of the first gradients.
If any rank finds a difference all send values again, in a call more for each unit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import Span, SpansOfRanks
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.state.apart import is_elementwise, looks_beyond
from fullshard.torch.state.forms import in_agreed_order
from fullshard.torch.state.owned import exchanged, is_cut
from fullshard.torch.tensor.checksum import checksum
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reslice import Cut, start_reslice

K = TypeVar("K")

CHECKED = "_fullshard_checked"
"""Marks an optimizer that was looked at, until its parameters are others."""


def exchange_matrices(optimizer: Optimizer) -> None:
    """Let ``optimizer``, as Muon, step each of its cut parameters whole, on one rank. Collective.

    For a model that is not to rest as ``align="matrix"`` leaves it. Each step sends gradients to
    owners and new values back, two calls for each unit, and values in a third one in the first
    step and whenever they were written since the last. Values and state rest whole with the owners,
    beside the parts; gradients are there whole for two units at a time. Raises
    `ConfigurationError` for optimizers that need no whole tensors and if ranks disagree on the
    parameters, and `NotSupportedError` for those that look beyond one parameter (see the trial of
    ``align="matrix"``) and for parameters cut over a tensor axis or at another dimension than the
    first.
    """
    kind = type(optimizer).__name__
    if is_elementwise(type(optimizer)):
        raise ConfigurationError(
            f"{kind} steps each element by itself and needs no whole matrices; leave "
            "exchange_matrices out"
        )
    places = exchanged(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    cut = [
        param
        for param in params
        if isinstance(param, ShardedParameter) and param.ownership.owner is None and param.numel()
    ]
    for param in cut:
        if not param.ownership.dim and param.ownership.tensor_parallel is None:
            continue
        raise NotSupportedError(
            f"{param.ownership.name!r} is cut over a tensor axis or at a dimension other than the "
            "first, and exchange_matrices knows neither; leave it to another optimizer"
        )
    reason = looks_beyond(optimizer) if cut else None
    if reason is not None:
        raise NotSupportedError(
            f"{kind} cannot step parameters one by one on their owners: {reason}. Use an "
            "elementwise optimizer (SGD, Adam, AdamW, ...)"
        )
    optimizer.__dict__.pop(CHECKED, None)
    by_comm: dict[Comm, list[ShardedParameter]] = {}
    for param in in_agreed_order(dict(enumerate(cut))).values():
        if param not in places:
            by_comm.setdefault(param.ownership.comm, []).append(param)
    for comm, of_comm in by_comm.items():
        owners = deal_out([_work(param.ownership.shape) for param in of_comm], [0.0] * comm.size)
        lines = {
            f"parameter {number}": f"{param.ownership.name} on rank {owner}"
            for number, (param, owner) in enumerate(zip(of_comm, owners, strict=True))
        }
        what = "the parameters given to exchange_matrices"
        verify_agreement(comm, lines, of_comm[0].device, what)
        for param, owner in zip(of_comm, owners, strict=True):
            held, numel = param.ownership, param.ownership.numel
            spans = SpansOfRanks(owner * numel, numel, numel, comm.size)
            places[param] = replace(
                held, spans=spans, device_mesh=None, placed=None, whole_on=owner
            )


def _work(shape: tuple[int, ...]) -> float:
    return muon_work(shape) if len(shape) > 1 else float(shape[0] if shape else 1)


@dataclass(frozen=True)
class _Move:
    """Elements that go from where they are to where they are wanted; ``local`` are this rank's."""

    local: Tensor
    comm: Comm
    here: Sequence[Span]
    there: Sequence[Span]


class MatrixExchange:
    """The way of one optimizer's gradients to owners, and of new values back, unit by unit."""

    def __init__(self, places: Mapping[Tensor, Ownership]):
        self._places = places
        self._kept: dict[ShardedParameter, Tensor] = {}  # whole, of what this rank owns
        self._written: dict[tuple[ShardedParameter, ...], Tensor] = {}  # checksums of units
        self._votes: dict[Comm, Tensor] = {}  # in this step, until it is known how they end
        self._resent: dict[Comm, bool] = {}

    def begin(self) -> list[tuple[ShardedParameter, ...]]:
        """Begin a step; return what has gradients, unit by unit, alike on all ranks."""
        self._votes, self._resent = {}, {}
        units: dict[object, list[ShardedParameter]] = {}
        for param in in_agreed_order({param: param for param in self._places}).values():
            if param.grad is not None:
                held = param.ownership
                units.setdefault((held.comm, held.unit), []).append(param)
        known, self._written = self._written, {}
        chosen = [tuple(params) for params in units.values()]
        for params in chosen:
            comm = params[0].ownership.comm
            vote = _checksum(params) != known[params] if params in known else None
            self._resent[comm] = self._resent.get(comm, False) or vote is None
            if vote is None:
                vote = torch.ones((), dtype=torch.bool, device=params[0].device)
            self._votes[comm] = vote | self._votes[comm] if comm in self._votes else vote
        return chosen

    def send(
        self, params: Sequence[ShardedParameter], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> Callable[[], dict[ShardedParameter, dict[str, Tensor]]]:
        """Start to send gradients of a unit, and state that was loaded. Collective.

        Returns what waits and gives, for what this rank owns, values ("") and what was sent, whole
        and by name ("grad of" the gradient). To be called in the order of the starts.
        """
        comm, moves = params[0].ownership.comm, {}
        for param in params:
            place, grad = self._places[param], param.grad
            assert grad is not None
            local = grad.local if isinstance(grad, ShardedParameter) else grad
            moves[param, "grad of"] = _move(local, param.ownership, place)
            for name, value in state.get(param, {}).items():
                if is_cut(value, place):
                    moves[param, name] = _move(value.local, value.ownership, place)
        vote = self._votes.pop(comm, None)
        if vote is not None:
            local = vote.reshape(1).to(next(iter(moves.values())).local)
            every, ranks = Span(0, comm.size), SpansOfRanks(0, comm.size, 1, comm.size)
            moves[params[0], "vote"] = _Move(local, comm, ranks, [every] * comm.size)
        finish = _start(moves, f"gradients of the unit of {params[0].ownership.name!r}")

        def receive() -> dict[ShardedParameter, dict[str, Tensor]]:
            values = finish()
            votes = values.pop((params[0], "vote"), None)
            if votes is not None:  # the host reads them, unless it knows
                self._resent[comm] = self._resent[comm] or bool((votes != 0).any())
            if self._resent[comm]:
                self._send_values(params)
            owned: dict[ShardedParameter, dict[str, Tensor]] = {}
            for (param, name), value in values.items():
                if self._places[param].owner == comm.rank:
                    owned.setdefault(param, {"": self._kept[param]})[name] = value.view(param.shape)
            return owned

        return receive

    def _send_values(self, params: Sequence[ShardedParameter]) -> None:
        moves = {p: _move(p.local.detach(), p.ownership, self._places[p]) for p in params}
        finish = _start(moves, f"values of the unit of {params[0].ownership.name!r}")
        for param, value in finish().items():
            if self._places[param].owner == param.ownership.comm.rank:
                self._kept[param] = value.view(param.shape)

    def give_back(
        self, params: tuple[ShardedParameter, ...], stepped: Mapping[ShardedParameter, Tensor]
    ) -> Callable[[], None]:
        """Start to send all ranks what owners have ``stepped``; return what waits. Collective."""
        self._kept.update({param: stepped[param].detach() for param in params if param in stepped})
        moves = {}
        for param in params:
            value = self._kept[param] if param in stepped else param.local.detach().new_empty(0)
            moves[param] = _move(value, self._places[param], param.ownership)
        finish = _start(moves, f"new values of the unit of {params[0].ownership.name!r}")

        def receive() -> None:
            for param, value in finish().items():
                param.local.detach().copy_(value.view(param.local.shape))
                count_change(param.local)
            self._written[params] = _checksum(params)

        return receive


def _move(local: Tensor, here: Ownership, there: Ownership) -> _Move:
    return _Move(local.reshape(-1), here.comm, here.spans, there.spans)


def _start(moves: Mapping[K, _Move], label: str) -> Callable[[], dict[K, Tensor]]:
    """Start moves of a unit, those of one dtype and device together; return what waits."""
    calls: dict[object, list[K]] = {}
    for key, move in moves.items():
        calls.setdefault((move.local.dtype, move.local.device.type), []).append(key)
    started = []
    for keys in calls.values():
        cuts = [Cut(moves[key].local, moves[key].here, moves[key].there) for key in keys]
        started.append((keys, start_reslice(moves[keys[0]].comm, cuts, label)))

    def finish() -> dict[K, Tensor]:
        return {k: v for keys, wait in started for k, v in zip(keys, wait(), strict=True)}

    return finish


def _checksum(params: Iterable[ShardedParameter]) -> Tensor:
    return checksum(torch.cat([p.local.detach().reshape(-1).view(torch.uint8) for p in params]))
