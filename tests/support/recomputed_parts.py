# SPDX-License-Identifier: Apache-2.0
"""Trees of units: ranks leave some out, and checkpoints of modules or functions run some again."""

import random
from types import MappingProxyType

import torch
from support.optional_parts import PARTS, Expert, Model, Residuals, draw, sharded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from fullshard.torch import fully_shard, mark_optional

__all__ = ["InFunctions", "RandomParts", "WrappedInside", "as_in_functions"]


class Leaf(nn.Linear):
    """A layer that takes the arguments of a `Branch`."""

    def forward(self, x, _used, _path):
        return super().forward(x)


class Branch(nn.Module):
    """Runs its children in turn, some in checkpoints, inside of which there are no others."""

    def __init__(self, chance, depth):
        super().__init__()
        self.children_in_turn = nn.ModuleList(
            Leaf(4, 4) if depth == 0 or chance.random() < 0.5 else Branch(chance, depth - 1)
            for _ in range(chance.choice([1, 2, 2, 3]))
        )
        for child in self.children_in_turn:
            child.optional = chance.random() < 0.55
            child.is_unit = isinstance(child, Leaf) or child.optional or chance.random() < 0.8
            child.saves, child.adds = chance.random() < 0.5, chance.random() < 0.7
        left = [*range(len(self.children_in_turn))]
        self.groups = []  # (how they run, children, whether something behind them is saved)
        while left:
            count = chance.choice([1, 1, 2, 3])
            way = chance.choice(["plain", "plain", "function", "function", "module"])
            self.groups.append((way, left[:count], chance.random() < 0.5))
            left = left[count:]
        self.recomputed = False  # in the forward that runs

    def forward(self, x, used, path=()):
        for way, children, saves in self.groups:
            if way == "function" and not self.recomputed:
                x = checkpoint(self.run, x, children, saves, used, path, use_reentrant=False)
            else:
                x = self.run(x, children, saves, used, path, way)
        return x

    def run(self, x, children, saves, used, path, way="function"):
        before = self.recomputed
        self.recomputed = before or way == "function"
        try:
            for number in children:
                x = self.run_child(number, x, used, (*path, number), way)
            return torch.tanh(x) if saves else x
        finally:  # an exception may end it, when it is recomputed
            self.recomputed = before

    def run_child(self, number, x, used, path, way):
        child = self.children_in_turn[number]
        inner = getattr(child, "module", child)  # of a wrapper
        alone = way == "module" and not self.recomputed
        if isinstance(inner, Branch):
            inner.recomputed = alone or self.recomputed
        for _ in range(used.get(path, 1) if inner.optional else 1):
            if alone:
                y = checkpoint(child, x, used, path, use_reentrant=False)
            else:
                y = child(x, used, path)
            y = torch.tanh(y) if inner.saves else y
            x = x + y if inner.adds or inner.optional else y
        return x


class RandomParts(nn.Module):
    """A tree drawn by ``seed``; ``frozen``: some of its layers."""

    def __init__(self, seed, frozen=False):
        super().__init__()
        chance = random.Random(seed)
        self.embed, self.body = nn.Linear(3, 4), Branch(chance, 2)
        draw(self, seed)
        for module in self.modules():
            if frozen and isinstance(module, Leaf) and chance.random() < 0.4:
                module.requires_grad_(False)

    def forward(self, text, used):
        return self.body(self.embed(text), used)

    def shard(self, mesh):
        below = [module for module in self.body.modules() if hasattr(module, "is_unit")]
        for module in reversed(below):
            if module.is_unit:
                fully_shard(module, mesh=mesh)
        fully_shard(self, mesh=mesh)
        optional = [module for module in below if module.optional]
        if optional:
            mark_optional(*optional)
        return self

    def patterns(self, ranks, seed):
        """For each rank how often it runs each optional unit, by its place in the tree."""
        chance = random.Random(seed)
        places = [*_optional_places(self.body, ())]
        return [{place: chance.choice([0, 0, 1, 1, 2]) for place in places} for _ in range(ranks)]


def _optional_places(branch, path):
    for number, child in enumerate(branch.children_in_turn):
        if child.optional:
            yield (*path, number)
        if isinstance(child, Branch):
            yield from _optional_places(child, (*path, number))


class WrappedInside(Residuals):
    """The blocks of `Residuals` as torchtitan shards them: a unit around a `CheckpointWrapper`."""

    options = MappingProxyType({})  # of the wrapper

    def shard(self, mesh, **options):
        self.again = False
        for number, block in enumerate(self.blocks):
            self.blocks[number] = checkpoint_wrapper(block, **self.options)
        for module in [*self.modules()][::-1]:
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh, optional=isinstance(module, Expert), **options)
        for block in self.blocks:
            fully_shard(block, mesh=mesh, **options)
        return fully_shard(self, mesh=mesh, **options)


class InFunctions(Model):
    """Text through functions that are checkpointed: around all, a part and a block, or a block."""

    way = "all"

    def forward(self, text, used):
        places = list(zip(PARTS, [*self.blocks, None], strict=True))
        x = self.embed(text)
        if self.way == "all":
            return self.rerun(self.run, x, places, text, used)
        for place in places:
            if self.way == "by part":
                x = self.rerun(self.run, x, [place], text, used)
            else:
                x = self.run(x, [(place[0], None)], text, used)
                x = self.rerun(self.run, x, [(place[0], place[1])], text, {})
        return x

    def rerun(self, function, *args):
        return checkpoint(function, *args, use_reentrant=False)

    def run(self, x, places, text, used):
        for name, block in places:
            for _ in range(used.get(name, 0)):
                x = x + getattr(self, name)(torch.cat([text, text[:, :2]], dim=1)).tanh()
            x = x if block is None else torch.tanh(block(x))
        return x


def as_in_functions(comm, way, **options):
    """The model of `sharded`, whose root checkpoints functions around its parts and blocks."""
    model = sharded(comm, "fully_shard", **options)
    model.__class__ = type("FSDPInFunctions", (type(model).__mro__[1], InFunctions), {})
    model.way = way
    return model
