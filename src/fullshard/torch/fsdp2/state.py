# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the state that FSDP2 keeps for a module, as far as libraries read it."""

from typing import NoReturn

from fullshard.torch.step.managed import ManagedUnit

__all__ = ["ModuleState"]


class ModuleState:
    """The answer of ``module._get_fsdp_state()``."""

    def __init__(self, managed: ManagedUnit):
        self._managed = managed

    @property
    def _is_root(self) -> bool | None:
        """None before the first forward, as with FSDP2: nobody knows yet."""
        return None if self._managed.tracker is None else self._managed.number == 0

    def _lazy_init(self) -> None:
        """Do nothing: what a first forward prepares, it prepares itself."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"fullshard's state of a module has no {name}: units are no parameter groups of "
            "PyTorch. Use the methods of FSDPModule (unshard, reshard, set_...), DTensor's "
            "attributes of module.parameters(), or start the script without fullshard"
        )
