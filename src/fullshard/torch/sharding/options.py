# SPDX-License-Identifier: Apache-2.0
"""The option classes of FSDP1 and FSDP2, and their translation for the engine.

They are PyTorch's own, but for those with something that PyTorch's have not.
"""

from dataclasses import InitVar, dataclass
from typing import Any, TypeVar, get_args

import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecision as MixedPrecision
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.layout import Align
from fullshard.core.strategy import Offload, Precision
from fullshard.torch.unit.buffers import dtype_name


@dataclass(frozen=True)
class MixedPrecisionPolicy(fsdp.MixedPrecisionPolicy):
    """PyTorch's precision options of FSDP2, for one call of `fully_shard`.

    Raises `NotSupportedError` for ``param_dtype_override_fn``, which PyTorch's main of 2026 has.
    """

    param_dtype_override_fn: InitVar[Any] = None

    def __post_init__(self, param_dtype_override_fn: Any) -> None:
        """Refuse a dtype for each parameter."""
        if param_dtype_override_fn is not None:
            raise NotSupportedError(
                "param_dtype_override_fn of PyTorch's FSDP2 of 2026 is not served: trained "
                "parameters of a unit are gathered in one dtype; shard modules that need another "
                "first, each with a MixedPrecisionPolicy of its own"
            )


@dataclass
class CPUOffload(fsdp.CPUOffload):
    """PyTorch's offload options of FSDP1, and ``offload_optimizer``, which FSDP1 lacks.

    ``offload_params``: shards, their gradients and optimizer state rest in host memory, every
    gather begins with a copy to the device. ``offload_optimizer`` alone: the same rest there, but
    the device keeps a working shard in the dtype of computation.
    """

    offload_optimizer: bool = False


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The dims of a larger mesh that `fully_shard` shards over and replicates over.

    Several names are one flattened axis. Raises `ConfigurationError` without any name.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ConfigurationError("DataParallelMeshDims needs a name for shard or replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dims sharded over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dims replicated over."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


T = TypeVar("T")


def _checked(name: str, value: Any, expected: type[T]) -> T:
    if value is None:
        return expected()
    if not isinstance(value, expected):
        raise ConfigurationError(
            f"{name} must be a {expected.__name__} or None, got {value!r} "
            "(take the class from fullshard.torch)"
        )
    return value


def _float_name(name: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigurationError(
            f"{name} must be a floating-point torch.dtype of at least 2 bytes, got {dtype!r}"
        )
    return dtype_name(dtype)


def precision_of(name: str, options: Any) -> Precision:
    """Translate FSDP1's or FSDP2's options, or None; a `ConfigurationError` has the ``name``."""
    output, keep = None, False
    policy: MixedPrecision | fsdp.MixedPrecisionPolicy
    if name == "mp_policy":
        policy = _checked(name, options, fsdp.MixedPrecisionPolicy)
        cast = cast_root = policy.cast_forward_inputs
        output = policy.output_dtype
    else:
        policy = _checked(name, options, MixedPrecision)
        _float_name(f"{name}.buffer_dtype", policy.buffer_dtype)
        cast, cast_root = policy.cast_forward_inputs, policy.cast_root_forward_inputs
        output = getattr(policy, "output_dtype", None)  # FSDP1 itself has no such option
        keep = policy.keep_low_precision_grads
    return Precision(
        compute=_float_name(f"{name}.param_dtype", policy.param_dtype),
        reduce=_float_name(f"{name}.reduce_dtype", policy.reduce_dtype),
        output=_float_name(f"{name}.output_dtype", output),
        cast_inputs=cast,
        cast_root_inputs=cast_root,
        keep_low_grads=keep,
    )


def offload_of(name: str, options: Any) -> Offload:
    """Translate a `CPUOffload`, an `OffloadPolicy` or None, given as ``name``."""
    if name == "cpu_offload":
        chosen = _checked(name, options, fsdp.CPUOffload)
        optimizer = getattr(chosen, "offload_optimizer", False)
        return Offload(params=chosen.offload_params, optimizer=optimizer)
    policy = _checked(name, options, OffloadPolicy)
    if isinstance(policy, CPUOffloadPolicy):
        return Offload(params=True, pin=policy.pin_memory)
    return Offload()


def check_align(align: Any) -> None:
    """Raise `ConfigurationError` unless ``align`` is "row", "element" or "matrix"."""
    known = (*get_args(Align), "matrix")
    if align not in known:
        raise ConfigurationError(f"align must be one of {known}, got {align!r}")
