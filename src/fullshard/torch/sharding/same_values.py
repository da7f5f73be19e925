# SPDX-License-Identifier: Apache-2.0
"""The check that all ranks start with the same values, by a checksum of each parameter.

[Note: Values of one rank]
Each rank keeps slices of its own full parameters. If rank 0 has loaded a checkpoint and the others
have not, 1/N of the sharded model is pretrained and the rest is noise, and nothing fails. So before
anything is changed the checksums of all parameters are compared, in one all-reduce. A checksum
does not depend on the device, see [Note: Weights of places] in `fullshard.torch.tensor.checksum`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.agreement import are_alike, bounds_of, by_rank, differing_texts
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.tensor.checksum import checksum
from fullshard.torch.tensor.tensor_parallel import held_here
from fullshard.torch.unit.extensions import is_extended, plain_data
from fullshard.torch.unit.guards.replicas import SWITCH
from fullshard.torch.unit.plan import Plan, own_value
from fullshard.torch.unit.sites import ParamSites
from fullshard.torch.unit.unit import owner_of

_NAMES_SHOWN = 10
_NO_VALUE = torch.iinfo(torch.int64).min  # of a parameter on the meta device; no checksum is that


def values_are_checked(wanted: bool) -> bool:
    """Return False if the caller, or ``FULLSHARD_CHECK_VALUES=0``, does not want the check."""
    return wanted and os.environ.get(SWITCH, "1") != "0"


class StartingValues:
    """The values that this rank is about to shard: a digest to send along, and the comparison.

    See [Note: Values of one rank]. Left out are units whose values come from the first rank, and
    parameters that a unit has already; all of them, unless ``checked``.
    """

    def __init__(
        self, units: Mapping[str, Sequence[ParamSites]], plans: Sequence[Plan], checked: bool
    ):
        self._plans = plans
        self._compared: dict[str, ParamSites] = {}
        bare = False
        for (name, params), plan in zip(units.items(), plans, strict=True):
            if plan.values is own_value:
                prefix = f"{name}." if name else ""
                bare |= any(each.param.is_meta for each in params)
                new = {
                    f"{prefix}{each.spec.name}": each
                    for each in params
                    if owner_of(each.param) is None
                }
                self._compared |= new if checked else {}
        self._sums = torch.zeros(0, dtype=torch.int64, device="cpu")
        if self._compared and _comms_of(plans):
            self._sums = _checksums([e.param for e in self._compared.values()], plans[0].device)
        digest = bounds_of(str(self._sums.tolist()).encode())
        self.digest: Tensor = torch.cat([digest, torch.tensor([int(bare)], device="cpu")])
        """To be replaced by the largest of all ranks, which `verify` and `bare_somewhere` read."""

    @property
    def bare_somewhere(self) -> bool:
        """True if a rank has parameters on the meta device."""
        return bool(self.digest[4] > 0)

    def verify(self, *, meta_on_some: bool) -> None:
        """Make sure that all ranks have the same values. Collective where digests differ.

        Where some ranks have values and others are on the meta device, those that have them are
        compared if ``meta_on_some`` says that such is allowed. Raises `ConfigurationError` on all
        ranks otherwise, with the names of the parameters.
        """
        if are_alike(self.digest[:4]):
            return
        comms, mine = _comms_of(self._plans), self._sums
        bare = (mine == _NO_VALUE).long()
        bounds = torch.stack([mine, torch.where(bare > 0, _NO_VALUE, ~mine), bare])
        for comm in comms:
            comm.all_reduce([bounds], "max", label="comparison of values").wait()
        largest, smallest, bare_somewhere = bounds[0], ~bounds[1], bounds[2] > 0
        has_values = largest != _NO_VALUE
        differing = has_values & (largest != smallest)
        if not meta_on_some:
            differing |= has_values & bare_somewhere
        compared = zip(self._compared, mine.tolist(), differing.tolist(), strict=True)
        found = [(name, int(value)) for name, value, differs in compared if differs]
        if found:
            told = _told(comms, found, len(self._compared), self._plans[0].device)
            raise ConfigurationError(told)


def _comms_of(plans: Sequence[Plan]) -> list[Comm]:
    return list(dict.fromkeys(comm for plan in plans for comm in plan.ranks.joining))


def _checksums(params: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Return the checksums of ``params`` in their order, as one vector on ``device``."""
    held = [plain_data(param) if is_extended(param) else held_here(param) for param in params]
    sums: list[Tensor | None] = [None] * len(held)
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(held):
        if each.is_meta:
            sums[number] = torch.full((), _NO_VALUE, device=device)
        elif type(each) not in (Tensor, nn.Parameter):  # of which nobody knows the memory
            sums[number] = torch.zeros((), dtype=torch.int64, device=device)
        else:
            by_device.setdefault(each.device, []).append(number)
    for numbers in by_device.values():  # one copy to ``device`` for each
        moved = torch.stack([checksum(held[number]) for number in numbers]).to(device)
        for number, value in zip(numbers, moved.unbind(), strict=True):
            sums[number] = value
    return torch.stack([each for each in sums if each is not None])


def _told(
    comms: Sequence[Comm], found: Sequence[tuple[str, int]], total: int, device: torch.device
) -> str:
    values = "\n".join(
        "no value (meta device)" if value == _NO_VALUE else f"checksum {value:x}"
        for _, value in found[:_NAMES_SHOWN]
    )
    lines = [f"\n  {name}" for name, _ in found[:_NAMES_SHOWN]]
    for comm in comms:
        texts = differing_texts(comm, values, device)
        if texts is not None:
            by_name = list(zip(*(text.split("\n") for text in texts), strict=True))
            lines = [
                f"{line}: {by_rank(comm, told)}" if len(set(told)) > 1 else line
                for line, told in zip(lines, by_name, strict=True)
            ]
    more = len(found) - _NAMES_SHOWN
    return (
        f"the ranks start with different values of {len(found)} of {total} parameters, and each "
        f"would keep slices of its own:{''.join(lines)}{f'{chr(10)}  and {more} more' * (more > 0)}"
        "\nSeed or load all ranks alike; or let rank 0's values go to all: "
        "FullyShardedDataParallel(..., sync_module_states=True), or before fully_shard "
        "torch.distributed.broadcast(param, 0) of each parameter. If other values are loaded after "
        f"sharding anyway, pass check_values=False (or set {SWITCH}=0 for the whole process)"
    )
