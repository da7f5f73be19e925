# SPDX-License-Identifier: Apache-2.0
"""Steps of whole-matrix optimizers over parameters that stay cut: each has an owner for a step.

[Note: An exchange]
Before a step all ranks send the owner of a parameter their parts of its values and gradient, those
of a unit in one call, and behind it the owner sends all ranks their parts of the new values. So a
step sends 3 (N - 1) / N of the parameters' bytes. State rests whole with the owner, as over
``align="matrix"``; what was loaded, cut, goes to the owner with the first gradient.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import SpansOfRanks
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.state.apart import ELEMENTWISE, looks_beyond
from fullshard.torch.state.forms import in_agreed_order
from fullshard.torch.state.owned import exchanged
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.reslice import Cut, reslice

__all__ = ["CHECKED", "exchange_matrices", "sent"]

CHECKED = "_fullshard_checked"
"""Marks an optimizer that was looked at, until its parameters are others."""


def exchange_matrices(optimizer: Optimizer) -> None:
    """Let ``optimizer``, as Muon, step each of its cut parameters whole, on one rank. Collective.

    For a model that is not to rest as ``align="matrix"`` leaves it. Each step sends values and
    gradients to owners and new values back, two calls for each unit; state rests with the owners,
    and during a step so do whole values and gradients of what they own. Raises
    `ConfigurationError` for optimizers that need no whole tensors and if ranks disagree on the
    parameters, and `NotSupportedError` for those that look beyond one parameter (see the trial of
    ``align="matrix"``) and for parameters cut over a tensor axis or at another dimension than the
    first.
    """
    kind = type(optimizer).__name__
    if type(optimizer) in ELEMENTWISE:
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
            places[param] = Ownership(
                held.name, held.shape, spans, comm, serial=held.serial, unit=held.unit
            )


def _work(shape: tuple[int, ...]) -> float:
    return muon_work(shape) if len(shape) > 1 else float(shape[0] if shape else 1)


def sent(
    moves: Iterable[tuple[ShardedParameter, Tensor, Ownership, Ownership]], what: str
) -> list[Tensor]:
    """Return this rank's parts of values that move from one ownership to another. Collective.

    Each move has the parameter that it is of, this rank's flat part, and where its elements are and
    go to. Those of a unit, and of one dtype and device, travel together.
    """
    moves = list(moves)
    calls: dict[object, list[int]] = {}
    for number, (param, local, _, _) in enumerate(moves):
        held = param.ownership
        key = held.comm, held.unit, local.dtype, local.device.type
        calls.setdefault(key, []).append(number)
    results: dict[int, Tensor] = {}
    for numbers in calls.values():
        results.update(zip(numbers, _sent_together([moves[n] for n in numbers], what), strict=True))
    return [results[number] for number in range(len(moves))]


def _sent_together(
    moves: Sequence[tuple[ShardedParameter, Tensor, Ownership, Ownership]], what: str
) -> list[Tensor]:
    first = moves[0][0].ownership
    cuts = [Cut(local.reshape(-1), there.spans, here.spans) for _, local, there, here in moves]
    return reslice(first.comm, cuts, f"{what} of the unit of {first.name!r}")
