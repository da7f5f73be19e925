# SPDX-License-Identifier: Apache-2.0
"""FSDP1's ``use_orig_params``: optimizers made before sharding continue with sharded parameters.

Under FSDP1 parameters stay the same objects, and optimizers notice nothing; here new parameters
replace them. Training libraries that are given model and optimizer together depend on it.
"""

import gc
from collections.abc import Sequence

from torch.optim import Optimizer

from fullshard.torch.unit.guards.replaced import Successor

__all__ = ["switch_optimizers"]


def switch_optimizers(successors: Sequence[Successor]) -> None:
    """Let the groups of all existing optimizers hold the successors of their parameters.

    An optimizer that has state of a parameter already keeps that parameter and is refused when it
    steps, because its state is not cut. Parameters that nobody holds any more are in no optimizer.
    """
    held = {old(): new for old, new in successors}
    held.pop(None, None)
    if not held:
        return
    for optimizer in _living_optimizers():
        for group in optimizer.param_groups:
            group["params"][:] = [
                param if param in optimizer.state else held.get(param, param)
                for param in group["params"]
            ]


def _living_optimizers() -> list[Optimizer]:
    """Find them among all objects: torch keeps no list of optimizers."""
    classes = {Optimizer}
    new = classes
    while new:
        new = {below for cls in new for below in cls.__subclasses__()} - classes
        classes = classes | new
    found = [each for each in gc.get_objects() if type(each) in classes]
    return [each for each in found if hasattr(each, "param_groups")]
