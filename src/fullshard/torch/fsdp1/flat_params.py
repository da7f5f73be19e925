# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for FSDP1's flat parameters, which some training libraries look for.

Lightning Fabric knows them by a mark, without which it refuses an optimizer (`mark_flattened`).
Hugging Face Accelerate, with mixed precision, goes through the wrappers and casts the flat
parameter of each to float32 if it is of lower precision, so that optimizers work on float32. So a
wrapper says that it has one as long as it rests in lower precision, and then it can be cast, by
that very assignment of ``.data``.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.core.errors import NotSupportedError
from fullshard.torch.optim.original_params import switch_optimizers
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.changes import LOW_PRECISION, rest_in_float32
from fullshard.torch.unit.unit import Unit

__all__ = ["CastableFlatParameter", "FlatParameter", "mark_flattened"]


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


class _FlatParameter:
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
        switch_optimizers(rest_in_float32(self._unit))


class CastableFlatParameter(nn.Module):
    """The part of FSDP1's wrapper that lets libraries cast what it keeps to float32."""

    @property
    def _has_params(self) -> bool:
        return self._flat_param is not None

    @property
    def _flat_param(self) -> _FlatParameter | None:
        managed = managed_unit_of(self)
        params = managed.unit.sharded if managed is not None else []
        low = [each for each in params if each.requires_grad and each.dtype in LOW_PRECISION]
        return _FlatParameter(managed.unit, low) if managed is not None and low else None

    @property
    def _handle(self) -> SimpleNamespace:
        return SimpleNamespace()  # is told the new dtype, which the unit knows
