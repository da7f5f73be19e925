# SPDX-License-Identifier: Apache-2.0
"""Putting the stand-ins in place, and taking them away.

[Note: Children]
A forked child has the drop-in from its parent. One that ``multiprocessing`` spawns, or takes from a
fork server, is a fresh interpreter: it unpickles what its parent prepared, then imports the
parent's main module, then runs its function. An object in what the parent prepares switches the
drop-in on when it is unpickled, so before any line of the script.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from fullshard.core.errors import UsageError
from fullshard.drop_in.stand_ins import replaced_names, stand_in, torchs_modules

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
