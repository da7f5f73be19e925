# SPDX-License-Identifier: Apache-2.0
"""FSDP1's types that choose the form of state dicts."""

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
    """The form of a state dict.

    FULL: whole tensors. SHARDED: DTensors, cut by rows. LOCAL: this rank's spans, flat and plain.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """The keys of an optimizer state dict: names or numbers of parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Options of model state dicts; ``offload_to_cpu`` puts values into host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options for LOCAL_STATE_DICT: those of its base."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor`` is accepted: values are DTensors always."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of optimizer state dicts; ``offload_to_cpu`` puts values into host memory."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options for LOCAL_STATE_DICT: those of its base, but values stay where they are."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """``_use_dtensor`` is accepted: values are DTensors always."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The chosen forms of a wrapper's state dict and of its optimizer's."""

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
    """Make the settings for ``kind``; raise `ConfigurationError` for a config of another kind."""
    expected, expected_optim = _CONFIGS[_checked(kind, StateDictType)]
    return StateDictSettings(
        kind,
        expected() if config is None else _checked(config, expected),
        expected_optim() if optim_config is None else _checked(optim_config, expected_optim),
    )
