# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for FSDP1's flat parameters and their handles, which some training libraries reach for.

Lightning Fabric knows them by a mark, without which it refuses an optimizer (`mark_flattened`).
Hugging Face Accelerate, with mixed precision, goes through the wrappers and casts the flat
parameter of each to float32 if it is of lower precision, so that optimizers work on float32. So a
wrapper says that it has one as long as it rests in lower precision, and then it can be cast, by
that very assignment of ``.data``. verl and those who followed it take a model off the device
between training and generation, handle by handle: a handle moves what its unit keeps.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._flat_param import _ShardParamInfo

from fullshard.core.errors import NotSupportedError
from fullshard.torch.step.managed import managed_unit_of, managed_units
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.changes import LOW_PRECISION, rest_as, rest_on
from fullshard.torch.unit.unit import Unit


class FlatParameter:
    """FSDP1's class of flat parameters, for scripts that ask ``isinstance(param, FlatParameter)``.

    Nothing is one here: parameters keep their names and shapes in ``model.parameters()``.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> "FlatParameter":
        """Refuse: there are none."""
        raise NotSupportedError(
            "there are no flat parameters here: parameters keep their names and shapes in "
            "model.parameters(), each a fullshard.torch.ShardedParameter"
        )


def mark_flattened(params: Iterable[Tensor]) -> None:
    """Put FSDP1's mark on the parameters of optimizers when ``use_orig_params`` is False."""
    for param in params:
        param._fsdp_flattened = True  # type: ignore[attr-defined]


class _CastableParameter:
    """The trained parameters of one unit that rest in lower precision than float32."""

    requires_grad = True

    def __init__(self, unit: Unit, params: Sequence[ShardedParameter]):
        self._unit = unit
        self._fqns = [param.ownership.name for param in params]
        self.dtype, self.device = params[0].dtype, params[0].device

    @property
    def data(self) -> Tensor:
        """An empty tensor: all that counts when one is assigned is its dtype."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != torch.float32 or value.numel():
            raise NotSupportedError(
                "fullshard has no flat parameters, what stands for one can only be cast to "
                f"float32 (flat.data = flat.data.float()), got {value.numel()} elements of "
                f"{value.dtype}; use the parameters that model.parameters() gives"
            )
        rest_as(self._unit, dict.fromkeys(LOW_PRECISION, torch.float32), trained_only=True)


class _RestingParameter:
    """The memory of all that this rank keeps of one unit, in the place of a flat parameter."""

    def __init__(self, unit: Unit):
        self._unit = unit
        self._shard = self.data

    @property
    def data(self) -> Tensor:
        """The memory, 1-D: of the parameters' dtype, or bytes if they are of several."""
        self._unit.catch_up()
        return self._unit.shards.buffer.memory

    @property
    def _local_shard(self) -> Tensor:  # one object, whose id verl holds against that of `data`
        if self._shard.data_ptr() != (data := self.data).data_ptr():
            self._shard = data
        return self._shard

    @_local_shard.setter
    def _local_shard(self, value: Tensor) -> None:
        if value.data_ptr() != self.data.data_ptr():
            raise NotSupportedError(
                "what stands for a flat parameter cannot be given other memory; write to the "
                "parameters that model.parameters() gives, or move them by handle.flat_param_to"
            )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"fullshard has no flat parameters; what stands for one has .data, and no {name}. Use "
            "the parameters that model.parameters() gives"
        )


def _as_flat(param: ShardedParameter, name: str) -> Tensor:
    flat, span = param.local.detach(), param.ownership.span
    found = (0, span.numel, span.start, span.stop - 1) if span.numel else (None,) * 4
    described = {
        "_is_flat_param": True,
        "_fqns": [name],
        "_shard_param_infos": [_ShardParamInfo(span.numel > 0, *found)],
    }
    flat.__dict__.update(described)
    return flat


class _Handle:
    """FSDP1's handle of one unit's flat parameter, as far as libraries use it."""

    def __init__(self, unit: Unit):
        self._unit = unit

    @property
    def _offload_params(self) -> bool:
        return self._unit.plan.offload.params

    @property
    def flat_param(self) -> _RestingParameter:
        """The memory of what this rank keeps."""
        return _RestingParameter(self._unit)

    def flat_param_to(self, device: Any, non_blocking: bool = False) -> None:
        """Move what this rank keeps; see `rest_on`. Waits for the copy, ``non_blocking`` or not."""
        rest_on(self._unit, torch.device(device))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            "fullshard has no handles; what stands for one has flat_param, flat_param_to and "
            f"_offload_params, and no {name}. Start the script with PyTorch's FSDP if it needs that"
        )


class FlatHandles(nn.Module):
    """The part of FSDP1's wrapper that lets libraries cast and move what it keeps.

    ``torch.distributed.fsdp._runtime_utils._lazy_init`` has nothing to do for a wrapper, since
    ``_is_root`` is known from the start.
    """

    @property
    def _is_root(self) -> bool:
        managed = managed_unit_of(self)
        return managed is None or managed.tracker is None or managed.number == 0

    @_is_root.setter
    def _is_root(self, value: bool) -> None:
        """Do nothing: verl says it before it summons one wrapper, which needs no root here."""

    @property
    def training_state(self) -> TrainingState:
        """Its place in FSDP1's words: in forward or backward, summoned, or idle."""
        managed = managed_unit_of(self)
        if managed is not None and managed.summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        if managed is not None and managed.in_step and (managed.step.running or managed.step.begun):
            return TrainingState.FORWARD_BACKWARD
        return TrainingState.IDLE

    @property
    def params(self) -> list[Tensor]:
        """This rank's part of each parameter, 1-D, described as a flat parameter of that one.

        OLMo reads whole checkpoints into these.
        """
        managed = managed_unit_of(self)
        if managed is None:
            return []
        names = [place.slot.spec.name for place in managed.unit.shards.places]
        return list(map(_as_flat, managed.unit.sharded, names))

    @property
    def _all_handles(self) -> list[_Handle]:
        return [_Handle(each.unit) for each in managed_units(self) if each.unit.params]

    @property
    def _handle(self) -> _Handle | None:
        managed = managed_unit_of(self)
        return _Handle(managed.unit) if managed is not None and managed.unit.params else None

    @property
    def _has_params(self) -> bool:
        return self._flat_param is not None

    @property
    def _flat_param(self) -> _CastableParameter | None:
        managed = managed_unit_of(self)
        params = managed.unit.sharded if managed is not None else []
        low = [each for each in params if each.requires_grad and each.dtype in LOW_PRECISION]
        return _CastableParameter(managed.unit, low) if managed is not None and low else None
