# SPDX-License-Identifier: Apache-2.0
"""Putting the stand-ins in place, and taking them away."""

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

from fullshard.core.errors import UsageError
from fullshard.drop_in.children import leave_children, tell_children
from fullshard.drop_in.stand_ins import replaced_names, stand_in, torchs_modules

__all__ = ["is_on", "switch_off", "switch_on"]

# The modules that have a stand-in now, by name; empty while the drop-in is off.
_before: dict[str, ModuleType] = {}


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
    tell_children()
    _before.update(originals)


def switch_off() -> None:
    """Give ``torch.distributed.fsdp`` back to PyTorch; names taken meanwhile stay fullshard's."""
    leave_children()
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
