# SPDX-License-Identifier: Apache-2.0
"""Which form of state dict FSDP1's wrappers give, as data."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from fullshard.core.errors import ConfigurationError

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "settings_of",
]


class StateDictType(Enum):
    """FULL: whole tensors. SHARDED: DTensors, by rows. LOCAL: this rank's spans, flat and plain."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What optimizer state dicts are keyed by."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """``offload_to_cpu``: values are in host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """As its base."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor`` is accepted: values are DTensors always."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """``offload_to_cpu``: values are in host memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """As its base, but values stay where they are."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """``_use_dtensor`` is accepted: values are DTensors always."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """What a wrapper's state dict and its optimizer's shall look like."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


T = TypeVar("T")


def _checked(value: T, expected: type[T]) -> T:
    if not isinstance(value, expected):
        raise ConfigurationError(f"expected a {expected.__name__}, got {value!r}")
    return value


def settings_of(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """The settings for ``kind``; raises `ConfigurationError` for a config of another kind."""
    expected, expected_optim = _CONFIGS[_checked(kind, StateDictType)]
    return StateDictSettings(
        kind,
        expected() if config is None else _checked(config, expected),
        expected_optim() if optim_config is None else _checked(optim_config, expected_optim),
    )
