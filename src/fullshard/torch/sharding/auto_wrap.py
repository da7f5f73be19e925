# SPDX-License-Identifier: Apache-2.0
"""``auto_wrap_policy="auto"``: units chosen by the planner from the module itself."""

import os
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
from torch import nn

from fullshard.core.strategy import AS_IT_RESTS
from fullshard.plan.choose.wrapping import choose_wrapping
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import cluster_of, device_of_driver, named_device
from fullshard.torch.sharding.find import find_parameters
from fullshard.wrap import CustomPolicy

_LISTS = (nn.ModuleList, nn.Sequential)


def auto_wrap_policy(
    root: nn.Module, ignored: AbstractSet[nn.Module] = frozenset()
) -> CustomPolicy:
    """The policy that the planner chooses for ``root`` on the ranks that there are.

    Candidates are the repeated modules (those of one class in a list), these and large modules
    beside them, what repeated modules are made of, and no units beside the root. The choice has the
    least memory among those whose gathers are long enough for the link. Nothing is collective: the
    same module on the same devices gives the same choice on every rank.
    """
    left_out = {below for module in ignored for below in module.modules()}
    by_path = {
        path: module
        for path, module in root.named_modules()
        if path and module not in left_out and any(True for _ in module.parameters())
        if type(module).forward is not nn.Module.forward
    }
    candidates = list(_candidates(root, by_path))
    specs = [each.spec for each in find_parameters([root])[0]]
    chosen = choose_wrapping(specs, candidates, _cluster(root), AS_IT_RESTS)
    units = {by_path[path] for path in chosen.paths}
    return CustomPolicy(lambda module: module in units)


def _candidates(root: nn.Module, by_path: dict[str, nn.Module]) -> Iterator[tuple[str, ...]]:
    blocks = tuple(_repeated(root, by_path))
    yield blocks
    inside = tuple(each + "." for each in blocks)
    each_numel = max((_numel(by_path[path]) for path in blocks), default=0)
    large = tuple(
        path
        for path, module in by_path.items()
        if path not in blocks
        and not path.startswith(inside)
        and not any(True for _ in module.children())
        and _numel(module) * 4 > each_numel > 0
    )
    if large:
        yield (*blocks, *large)
    parts = tuple(
        path
        for path in by_path
        if path.rpartition(".")[0] in blocks and _numel(by_path[path]) * 8 > each_numel
    )
    if parts:
        yield (*parts, *large)
    if blocks:
        yield ()


def _repeated(root: nn.Module, by_path: dict[str, nn.Module]) -> Iterator[str]:
    """Modules of a class that a list has at least two of, the outermost of them."""
    found: list[str] = []
    for path, module in root.named_modules():
        if not isinstance(module, _LISTS) or any(path.startswith(each + ".") for each in found):
            continue
        classes = Counter(type(child) for child in module)
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            repeated = classes[type(child)] > 1 and not isinstance(child, nn.Linear)
            if repeated and below in by_path and any(True for _ in child.children()):
                found.append(below)
    yield from found


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _cluster(root: nn.Module) -> Cluster:
    """The ranks that there are, on the devices that this process has."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    local = min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    device = named_device("cpu")
    if torch.cuda.is_available():
        device = device_of_driver(torch.cuda.get_device_name()) or named_device("h100")
    per_host = local if world % max(local, 1) == 0 else 1
    return cluster_of(device, world, per_host=max(1, per_host))
