# SPDX-License-Identifier: Apache-2.0
"""FSDP1's ``use_orig_params``: optimizers made before sharding continue with sharded parameters.

Under FSDP1 parameters stay the same objects, and optimizers notice nothing; here new parameters
replace them. Training libraries that are given model and optimizer together depend on it.
"""

import gc
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fullshard.torch.unit.guards.replaced import Successor


def switch_optimizers(successors: Sequence[Successor]) -> None:
    """Let the groups of all existing optimizers hold the successors of their parameters.

    An optimizer that has state of a parameter already keeps that parameter and is refused when it
    steps, because its state is not cut. Parameters that nobody holds any more are in no optimizer.
    """
    held = {old: new for of_old, new in successors if (old := of_old()) is not None}
    if not held:
        return
    for optimizer in _optimizers_over(list(held)):
        for group in optimizer.param_groups:
            group["params"][:] = [
                param if param in optimizer.state else held.get(param, param)
                for param in group["params"]
            ]


def _optimizers_over(params: Sequence[Tensor]) -> list[Optimizer]:
    """Find the optimizers of ``params`` by who refers to whom: torch keeps no list of them.

    `gc.get_objects` would hand out tuples that other threads are still building, which fails in
    those threads as soon as somebody else refers to them.
    """
    lists: list[list[Tensor]] = []
    while params:
        refer = gc.get_referrers(*params[:_AT_ONCE])
        lists += [each for each in refer if type(each) is list and each is not params]
        seen = {id(param) for each in lists for param in each}
        params = [param for param in params[_AT_ONCE:] if id(param) not in seen]
    holders: Sequence[Any] = lists
    found: dict[int, Optimizer] = {}
    for _ in range(4):  # groups, the list of groups, attributes, and what they are attributes of
        holders = [
            each for each in gc.get_referrers(*holders) if isinstance(each, (list, dict, Optimizer))
        ]
        found |= {id(each): each for each in holders if isinstance(each, Optimizer)}
    return list(found.values())


_AT_ONCE = 64  # a search takes the longer the more it looks for
