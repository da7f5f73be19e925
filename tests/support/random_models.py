# SPDX-License-Identifier: Apache-2.0
"""Random models, a seed each: nesting, ties, frozen and mixed dtypes, odd calls, recomputation."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Node(nn.Module):
    """Some parameters of its own around some children, each called any number of times."""

    def __init__(self, choose, depth):
        super().__init__()
        self.kinds = [kind for kind in ("weight", "bias", "gain") if choose.random() < 0.6]
        self.kinds = self.kinds or ["bias"] * (depth == 3)  # the root has something to train
        shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,), "gain": ()}
        for kind in self.kinds:
            dtype = torch.float32 if choose.random() < 0.2 else torch.float64
            param = nn.Parameter(torch.randn(shapes[kind], dtype=dtype))
            self.register_parameter(kind, param.requires_grad_(choose.random() < 0.8))
        count = choose.randint(0, 3) if depth else 0
        self.below = nn.ModuleList(Node(choose, depth - 1) for _ in range(count))
        how_often = choose.randint(0, 4) if count else 0
        self.calls = [(choose.randrange(count), choose.choice(CALLS)) for _ in range(how_often)]
        self.own_last = choose.random() < 0.5

    def forward(self, x, *, scale=1.0):
        if not self.own_last:
            x = self.own(x)
        for number, call in self.calls:
            x = call(self.below[number], x)
        return {"y": self.own(x) if self.own_last else x, "unused": (x * scale, None)}

    def own(self, x):
        if "weight" in self.kinds:
            x = x @ self.weight.to(x.dtype)
        if "gain" in self.kinds:
            x = x * self.gain.to(x.dtype)
        if "bias" in self.kinds:
            x = x + self.bias.to(x.dtype)
        return torch.tanh(x) * 1.0 if self.kinds else x


def run(node, x):
    return node(x)["y"]


def residual(node, x):
    return x + 0.5 * run(node, x)


def in_place(node, x):
    return run(node, x.clone()).mul_(0.5).add_(x)


def of_a_constant(node, x):
    return x + run(node, torch.ones_like(x))


def keywords(node, x):
    return node(x=x, scale=2.0)["y"]


def recomputed(node, x):
    return checkpoint(run, node, x, use_reentrant=False)


def recomputed_reentrant(node, x):
    return checkpoint(run, node, x, use_reentrant=True) if x.requires_grad else run(node, x)


def without_gradient(node, x):
    with torch.no_grad():
        return x + run(node, x)


def thrown_away(node, x):
    run(node, x)
    return x


CALLS = [run] * 4 + [
    residual,
    in_place,
    of_a_constant,
    keywords,
    recomputed,
    recomputed_reentrant,
    without_gradient,
    thrown_away,
]


def build(seed):
    """The model of ``seed`` and the names of the modules that are to be units."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    model = Node(choose, depth=3)
    nodes = [module for module in model.modules() if isinstance(module, Node)]
    for first, second in zip(nodes, choose.sample(nodes, len(nodes)), strict=True):
        for kind in first.kinds if choose.random() < 0.2 else ():
            if kind in second.kinds:
                setattr(second, kind, getattr(first, kind))
    units = {name for name, m in model.named_modules() if isinstance(m, Node) and name}
    return model, {name for name in sorted(units) if choose.random() < 0.6}
