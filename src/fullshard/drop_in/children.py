# SPDX-License-Identifier: Apache-2.0
"""The drop-in in processes that ``multiprocessing`` starts (``torch.multiprocessing.spawn`` too).

A forked child has it from its parent. One that is spawned, or comes from a fork server, is a fresh
interpreter: it unpickles what its parent prepared, then imports the parent's main module, then runs
its function. An object in what the parent prepares switches the drop-in on when it is unpickled,
so before any line of the script.
"""

import importlib
from multiprocessing import spawn
from typing import Any

__all__ = ["leave_children", "tell_children"]

_KEY = "fullshard.drop_in"  # multiprocessing ignores keys that it does not know
_plain = spawn.get_preparation_data


class _SwitchOn:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, ("fullshard.drop_in",)


def tell_children() -> None:
    """Have processes that are started from now on begin with the drop-in."""
    spawn.get_preparation_data = _prepared


def leave_children() -> None:
    """Have processes that are started from now on begin without."""
    spawn.get_preparation_data = _plain


def _prepared(name: str) -> dict[str, Any]:
    return {_KEY: _SwitchOn(), **_plain(name)}
