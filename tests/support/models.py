# SPDX-License-Identifier: Apache-2.0
"""Small models that have what breaks sharding engines, and how each is cut into units."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=12, blocks=2, tied=False):
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width, heads=2) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3)
        self.conv2 = nn.Conv2d(3, 5, 3, bias=False)
        self.fc = nn.Linear(5 * 4, 7)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return self.fc(x.flatten(1))


class Twice(nn.Module):
    """One module called twice, once with an input that needs no gradient."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Nested(nn.Module):
    """Units in units, each with parameters of its own, and an input that skips one."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6))
            self.deep = nn.Linear(6, 6)

        def forward(self, x):
            return self.deep(x * self.scale) + self.scale

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(4, 6)
            self.inner = Nested.Inner()
            self.after = nn.Linear(6, 4)

        def forward(self, x, skip=None):
            return {"y": self.after(torch.tanh(self.inner(self.before(x)))) + skip}

    def __init__(self):
        super().__init__()
        self.outer1 = Nested.Outer()
        self.outer2 = Nested.Outer()
        self.out = nn.Linear(4, 2)

    def forward(self, x):
        h = self.outer1(x, skip=x)["y"]
        return self.out(self.outer2(h, skip=x)["y"])


class Odd(nn.Module):
    """Scalars, empty tensors, prime shapes, a transposed parameter, one that is never used."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.3))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.weight = nn.Parameter(torch.randn(7, 3).t())
            self.bias = nn.Parameter(torch.randn(1, 1, 7))

        def forward(self, x):
            return torch.tanh(x @ self.weight * self.gain + self.bias[0, 0]) + self.empty.sum()

    def __init__(self):
        super().__init__()
        self.part1 = Odd.Part()
        self.middle = nn.Linear(7, 3)
        self.part2 = Odd.Part()

    def forward(self, x):
        return self.part2(self.middle(self.part1(x)))


class Made(nn.Module):
    """Parts by name, and ``run(module, *args)``, which computes with them."""

    def __init__(self, run, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A model, its units bottom-up (the root comes last and is not named), and its data."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    batch: Callable[[int], tuple[Tensor, Tensor]]


def _regression(width_in, width_out):
    return lambda size: (torch.randn(size, width_in), torch.randn(size, width_out))


CASES = {
    "gpt": Case(
        GPT,
        ("blocks.0", "blocks.1"),
        lambda size: (torch.randint(17, (size, 6)), torch.randint(17, (size, 6))),
    ),
    "conv": Case(
        ConvNet,
        ("conv1", "conv2"),
        lambda size: (torch.randn(size, 1, 8, 8), torch.randint(7, (size,))),
    ),
    "twice": Case(Twice, ("shared",), _regression(5, 3)),
    "nested": Case(
        Nested, ("outer1.inner", "outer1", "outer2.inner.deep", "outer2"), _regression(4, 2)
    ),
    "odd": Case(Odd, ("part1", "part2"), _regression(3, 7)),
}


_generator = threading.Lock()  # torch's default generator is one for all threads


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What ``build`` makes, the same for the same seed on every thread."""
    with _generator:
        torch.manual_seed(seed)
        return build()


def make(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """The case's plain model, the same for the same seed."""
    return seeded(CASES[name].build, seed).to(dtype)


def make_batches(name: str, steps: int, size: int, dtype: torch.dtype = torch.float32):
    """``steps`` batches of ``size`` samples, the same on every call."""
    with _generator:
        torch.manual_seed(99)
        batches = [CASES[name].batch(size) for _ in range(steps)]
    return [tuple(t.to(dtype) if t.is_floating_point() else t for t in b) for b in batches]


def place_of(ranks) -> tuple[int, int]:
    """This rank and how many there are, of a `Comm` or a process group."""
    if callable(ranks.rank):
        return ranks.rank(), ranks.size()
    return ranks.rank, ranks.size


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean loss over all samples (and positions) of a batch."""
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
