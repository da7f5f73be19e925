# SPDX-License-Identifier: Apache-2.0
"""The option classes of FSDP1 and FSDP2, and the check of what this version can do with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError

__all__ = [
    "CPUOffload",
    "CPUOffloadPolicy",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "refuse_unsupported",
]


@dataclass(frozen=True)
class MixedPrecision:
    """FSDP1's precision options. Only the default (no change of dtype) works in this version."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """FSDP2's precision options. Only the default (no change of dtype) works in this version."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class CPUOffload:
    """FSDP1's offload options. Only the default (nothing offloaded) works in this version."""

    offload_params: bool = False
    offload_optimizer: bool = False


@dataclass(frozen=True)
class OffloadPolicy:
    """FSDP2's offload options: nothing is offloaded."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """FSDP2's offload to host memory; not in this version."""

    pin_memory: bool = True


def _asks_for_nothing(value: object) -> bool:
    if value is None or value is False or (isinstance(value, (set, list, tuple)) and not value):
        return True
    if isinstance(value, (MixedPrecision, MixedPrecisionPolicy)):
        return all(
            getattr(value, field.name) is None
            for field in fields(value)
            if field.name.endswith("_dtype")
        )
    return value == CPUOffload() or type(value) is OffloadPolicy


_EXPECTED: dict[str, tuple[type, ...]] = {
    "mixed_precision": (MixedPrecision,),
    "mp_policy": (MixedPrecisionPolicy,),
    "cpu_offload": (CPUOffload,),
    "offload_policy": (OffloadPolicy,),
}


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raise `NotSupportedError` naming the first argument that asks for what is not built yet.

    A value of a class that does not belong there raises `ConfigurationError`.
    """
    for name, value in arguments.items():
        expected = _EXPECTED.get(name)
        if value is not None and expected and not isinstance(value, expected):
            raise ConfigurationError(
                f"{name} must be a {expected[0].__name__} or None, got {value!r} "
                "(take the class from fullshard.torch)"
            )
        if not _asks_for_nothing(value):
            raise NotSupportedError(
                f"{name}={value!r} is not supported yet; leave {name} at its default"
            )
