# SPDX-License-Identifier: Apache-2.0
"""The modules of torch that a script may take sharding from, and their stand-ins.

[Note: Stand-ins] A served module is not changed. Another module object takes its place in
``sys.modules`` and in its parent: public names of ours first, everything else passed on to
torch's. So torch's functions, whose globals are their own module's, go on to mean torch's classes
(``torch.distributed.checkpoint`` asks torch's wrapper for its units and must not find ours), and
taking the stand-ins away leaves nothing behind.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# Imported for what follows from it: all served modules, and the parts of torch that take names from
# them when they are imported. These keep torch's own: to them our modules are plain ones.
import torch.distributed._composable.fsdp.fully_shard
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper
import torch.distributed.algorithms._optimizer_overlap
import torch.distributed.checkpoint.optimizer
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.optim
import torch.distributed.pipelining
import torch.distributed.tensor.parallel.fsdp  # noqa: F401
from torch.distributed.fsdp._common_utils import TrainingState

import fullshard.wrap
from fullshard.torch import fsdp1, fsdp2

_FSDP = "torch.distributed.fsdp"

_SERVED_MODULES = (
    _FSDP,
    f"{_FSDP}.api",
    f"{_FSDP}.fully_sharded_data_parallel",
    f"{_FSDP}.sharded_grad_scaler",
    f"{_FSDP}.wrap",
    f"{_FSDP}._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

_OURS = {
    name: getattr(home, name) for home in (fsdp1, fsdp2, fullshard.wrap) for name in home.__all__
} | {"TrainingState": TrainingState}

_OTHERWISE = "start the script without fullshard if it cannot do without"


def replaced_names(original: ModuleType) -> dict[str, Any]:
    """Return replacements for public names of a served module; some are torch's own here, too."""
    public = _public(original).items()
    return {name: _OURS[name] for name, value in public if _OURS.get(name, value) is not value}


def stand_in(original: ModuleType) -> ModuleType:
    """Return a module that passes for ``original``; names that we lack raise `ImportError`."""
    ours = replaced_names(original)
    lacking = _public(original).keys() - _OURS.keys()
    module = ModuleType(original.__name__, original.__doc__)
    for name in ("__file__", "__loader__", "__package__", "__path__", "__spec__"):
        if hasattr(original, name):
            setattr(module, name, getattr(original, name))
    if hasattr(original, "__all__"):
        vars(module)["__all__"] = [name for name in original.__all__ if name not in lacking]
    vars(module)["__dir__"] = lambda: sorted({*vars(module), *dir(original)} - lacking)
    vars(module)["__getattr__"] = _passing_on(original, lacking)
    vars(module).update(ours)
    return module


def _public(module: ModuleType) -> Mapping[str, Any]:
    """Classes and functions of torch's sharding that ``module`` has under a public name."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith(_FSDP)
    }


def _passing_on(original: ModuleType, lacking: set[str]) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if name in lacking:
            # Not an AttributeError: `from ... import name` would swallow its message.
            raise ImportError(
                f"fullshard stands in for {original.__name__} and has no {name}: {_OTHERWISE}",
                name=original.__name__,
            )
        return getattr(original, name)

    return __getattr__


def torchs_modules() -> dict[str, ModuleType]:
    """Return the served modules by name as torch has them, while no stand-in is in place."""
    return {name: sys.modules[name] for name in _SERVED_MODULES}
