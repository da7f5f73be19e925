# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the modules of torch that a script may take sharding from, put in place or away.

[Note: Stand-ins] A served module is not changed. Another module object takes its place in
``sys.modules`` and in its parent: public names of ours first, everything else passed on to
torch's. So torch's functions, whose globals are their own module's, go on to mean torch's classes
(``torch.distributed.checkpoint`` asks torch's wrapper for its units and must not find ours), and
taking the stand-ins away leaves nothing behind.

[Note: Children]
A forked child has the drop-in from its parent. One that ``multiprocessing`` spawns, or takes from a
fork server, is a fresh interpreter: it unpickles what its parent prepared, then imports the
parent's main module, then runs its function. An object in what the parent prepares switches the
drop-in on when it is unpickled, so before any line of the script.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import spawn
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
from fullshard.core.errors import UsageError
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


# The modules that have a stand-in now, by name; empty while the drop-in is off.
_before: dict[str, ModuleType] = {}


_KEY = "fullshard.drop_in"  # multiprocessing ignores keys that it does not know
_plain = spawn.get_preparation_data


def is_on() -> bool:
    """Return whether ``torch.distributed.fsdp`` is fullshard's in this process."""
    return bool(_before)


def switch_on() -> None:
    """Make ``torch.distributed.fsdp`` fullshard's, here and in processes spawned from here.

    Does nothing if it is so already. Not collective.

    Raises:
        UsageError: a module outside of torch has taken names from ``torch.distributed.fsdp``
            already, and would go on to use PyTorch's; nothing was changed.
    """
    if is_on():
        return
    originals = torchs_modules()
    taken = sorted(_taken_names(originals))
    if taken:
        raise UsageError(
            f"PyTorch's sharding was imported before fullshard.drop_in: {', '.join(taken)}. Make "
            "`import fullshard.drop_in` the first line of the script, or leave it out and start "
            "the script with `fullshard run`"
        )
    _put({name: stand_in(module) for name, module in originals.items()}, originals)
    spawn.get_preparation_data = _prepared
    _before.update(originals)


def switch_off() -> None:
    """Give ``torch.distributed.fsdp`` back to PyTorch; names taken meanwhile stay fullshard's."""
    spawn.get_preparation_data = _plain
    _put(_before, {name: sys.modules[name] for name in _before})
    _before.clear()


def _put(modules: Mapping[str, ModuleType], replacing: Mapping[str, ModuleType]) -> None:
    sys.modules.update(modules)
    for name, module in modules.items():
        parent_name, _, attribute = name.rpartition(".")
        parent = sys.modules[parent_name]
        # Compared first: a package may have a function under the name of its submodule.
        if getattr(parent, attribute, None) is replacing[name]:
            setattr(parent, attribute, module)


def _taken_names(originals: Mapping[str, ModuleType]) -> Iterator[str]:
    theirs = {id(module) for module in originals.values()}
    for module in originals.values():
        theirs.update(id(vars(module)[name]) for name in replaced_names(module))
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", "fullshard"):
            continue
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in theirs:
                    yield f"{module_name}.{name}"


class _SwitchOn:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, ("fullshard.drop_in",)


def _prepared(name: str) -> dict[str, Any]:
    """Return what a spawned child is told; see [Note: Children]."""
    return {_KEY: _SwitchOn(), **_plain(name)}
