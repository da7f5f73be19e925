# SPDX-License-Identifier: Apache-2.0
"""FSDP1's state dicts: the form that was chosen, by wrapper."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError
from fullshard.torch.hooks import managed_unit_of
from fullshard.torch.modules import WRAPPED
from fullshard.torch.parameter import ShardedParameter
from fullshard.torch.state_dict_types import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_of,
)

__all__ = ["StateDictForms", "wrappers_in"]

_STATE_DICT_SETTINGS = "_fullshard_state_dict_settings"


class StateDictForms(nn.Module):
    """The part of FSDP1's wrapper that is about state dicts."""

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The wrapped module's state dict in the form that `set_state_dict_type` has chosen.

        Without a choice entries are sharded: each rank has its spans. FULL_STATE_DICT gathers
        parameter by parameter, collectively.
        """
        if args:
            destination, prefix, keep_vars = (*args, destination, prefix, keep_vars)[:3]
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        state = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        settings = self.__dict__.get(_STATE_DICT_SETTINGS)
        if settings is None:
            return state
        return _as_chosen(state, settings, first=_speaks_for_all(self))

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of state dicts of the outermost wrappers in ``module``.

        Returns the former choice. The optimizer's part is kept, and not used yet.
        """
        chosen = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        former = StateDictForms.get_state_dict_type(module)
        for wrapper in wrappers_in(module, StateDictForms, root_only=True):
            wrapper.__dict__[_STATE_DICT_SETTINGS] = chosen
        return former

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form of state dicts of the first outermost wrapper in ``module``."""
        for wrapper in wrappers_in(module, StateDictForms, root_only=True):
            settings: StateDictSettings | None = wrapper.__dict__.get(_STATE_DICT_SETTINGS)
            return settings or StateDictSettings()
        raise ConfigurationError(f"{type(module).__name__} holds no FullyShardedDataParallel")

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for a while."""
        former = StateDictForms.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            StateDictForms.set_state_dict_type(
                module,
                former.state_dict_type,
                former.state_dict_config,
                former.optim_state_dict_config,
            )


W = TypeVar("W", bound=nn.Module)


def wrappers_in(module: nn.Module, kind: type[W], *, root_only: bool) -> list[W]:
    """The modules of class ``kind`` in ``module``; ``root_only``: those not inside another."""
    wrappers = [each for each in module.modules() if isinstance(each, kind)]
    if not root_only:
        return wrappers
    inner = {below for each in wrappers for below in each.modules() if below is not each}
    return [each for each in wrappers if each not in inner]


def _speaks_for_all(wrapper: nn.Module) -> bool:
    managed = managed_unit_of(wrapper)
    return managed is None or managed.unit.ranks.first


def _as_chosen(
    state: dict[str, Any], settings: StateDictSettings, *, first: bool
) -> dict[str, Any]:
    """A state dict of sharded entries in the form of ``settings``. Collective for the full form."""
    config = settings.state_dict_config
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return state
    kept = first or not getattr(config, "rank0_only", False)
    for name in list(state):
        value = state[name]
        full = value.full_tensor() if isinstance(value, ShardedParameter) else value
        if not kept:
            del state[name]
        else:
            state[name] = full.cpu() if config.offload_to_cpu and isinstance(full, Tensor) else full
    return state
