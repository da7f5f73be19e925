# SPDX-License-Identifier: Apache-2.0
"""FSDP1's model state dicts, in the form that was chosen for each wrapper."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fullshard.core.errors import ConfigurationError
from fullshard.torch.sharding.module_buffers import buffer_dtypes
from fullshard.torch.state.forms import StateForm, ask_before_loading, collecting, hand_out
from fullshard.torch.state.optimizers import as_span
from fullshard.torch.step.managed import speaks_for_all
from fullshard.torch.unit.sites import WRAPPED


class StateDictForms(nn.Module):
    """The part of FSDP1's wrapper that is about state dicts."""

    _state_dict_settings: StateDictSettings | None = None

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return the wrapped module's state dict in the form that `set_state_dict_type` chose.

        Collective. Without a choice every rank gets whole tensors, gathered unit by unit, as from
        FSDP1, and `torch.distributed.checkpoint` DTensors; its ``get_state_dict`` and their like
        get DTensors whatever is chosen. With ``keep_vars`` entries are the sharded parameters
        themselves.
        """
        if args:
            destination, prefix, keep_vars = (*args, destination, prefix, keep_vars)[:3]
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        chosen = self._state_dict_settings
        asking = _asking_module()
        if asking == _DCP_STATE_DICT or (chosen is None and asking.startswith(_DCP)):
            chosen = _settings_of(StateDictType.SHARDED_STATE_DICT)
        with collecting("wrapper") as (outermost, _):
            state = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if outermost and not keep_vars:
            for name, dtype in buffer_dtypes(self).items():
                if (key := f"{prefix}{name}") in state:  # others are not persistent
                    state[key] = state[key].to(dtype)
            hand_out(state, prefix, _form(chosen or _settings_of(), self))
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load whole tensors, DTensors or, if LOCAL_STATE_DICT is chosen, this rank's spans.

        Collective for DTensors.
        """
        chosen = self._state_dict_settings or _settings_of()
        if chosen.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            params = dict(self.named_parameters(remove_duplicate=False))
            state_dict = {key: as_span(v, params.get(key)) for key, v in state_dict.items()}
        ask_before_loading(state_dict.values(), self.parameters())
        return super().load_state_dict(state_dict, strict, assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the prefix that `torch.distributed.checkpoint` must strip from keys."""
        return {"": WRAPPED}

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of state dicts of the wrappers in ``module``; return the former one."""
        chosen = _settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        former = StateDictForms.get_state_dict_type(module)
        for wrapper in wrappers_in(module, StateDictForms, root_only=False):
            wrapper._state_dict_settings = chosen
        return former

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of state dicts of the first outermost wrapper in ``module``."""
        for wrapper in wrappers_in(module, StateDictForms, root_only=True):
            return wrapper._state_dict_settings or _settings_of()
        raise ConfigurationError(f"{type(module).__name__} holds no FullyShardedDataParallel")

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Choose the form of state dicts within, and restore the former choice."""
        wrappers = wrappers_in(module, StateDictForms, root_only=False)
        former = [wrapper._state_dict_settings for wrapper in wrappers]
        StateDictForms.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, former, strict=True):
                wrapper._state_dict_settings = settings


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def _settings_of(
    kind: StateDictType = StateDictType.FULL_STATE_DICT,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Make the settings for ``kind``; raise `ConfigurationError` for a config of another kind."""
    if not isinstance(kind, StateDictType):
        raise ConfigurationError(f"expected a StateDictType, got {kind!r}")
    expected, expected_optim = _CONFIGS[kind]
    config = expected() if config is None else config
    optim_config = expected_optim() if optim_config is None else optim_config
    for value, of_kind in ((config, expected), (optim_config, expected_optim)):
        if not isinstance(value, of_kind):
            raise ConfigurationError(f"expected a {of_kind.__name__}, got {value!r}")
    return StateDictSettings(kind, config, optim_config)


W = TypeVar("W", bound=nn.Module)


def wrappers_in(module: nn.Module, kind: type[W], *, root_only: bool) -> list[W]:
    """List the modules of class ``kind`` in ``module``; ``root_only``: only outermost ones."""
    wrappers = [each for each in module.modules() if isinstance(each, kind)]
    if not root_only:
        return wrappers
    inner = {below for each in wrappers for below in each.modules() if below is not each}
    return [each for each in wrappers if each not in inner]


def _form(settings: StateDictSettings, wrapper: nn.Module) -> StateForm:
    config = settings.state_dict_config
    kept = not getattr(config, "rank0_only", False) or speaks_for_all(wrapper)
    return StateForm(settings.state_dict_type, config.offload_to_cpu, kept)


# [Note: Who asks for a state dict]
# FSDP1's default is whole tensors. torch.distributed.checkpoint knows torch's own class and chooses
# the sharded form for it by itself; our wrapper it takes for an ordinary module whose entries it
# expects to be DTensors. Nothing in its call tells that apart from a user's, but where it comes
# from. Its `state_dict` module chooses for torch's class even over a user's choice; the others take
# what a user has chosen.
_DCP = "torch.distributed.checkpoint."
_DCP_STATE_DICT = f"{_DCP}state_dict"


def _asking_module() -> str:
    """Return the name of the module whose code asks for the state dict."""
    names = (str(f.f_globals.get("__name__", "")) for f, _ in walk_stack(sys._getframe(2)))
    inside = ("torch.nn.", "fullshard.torch.")  # modules ask those inside them
    return next((name for name in names if not name.startswith(inside)), "")
