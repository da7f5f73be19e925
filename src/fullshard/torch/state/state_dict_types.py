# SPDX-License-Identifier: Apache-2.0
"""FSDP1's types that choose the form of state dicts: PyTorch's own, which only hold a choice."""

from typing import TypeVar

from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

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
    kind: StateDictType = StateDictType.FULL_STATE_DICT,
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
