# SPDX-License-Identifier: Apache-2.0
"""A stack of Llama's blocks, for steps on a GPU."""

import math
from functools import partial

import torch
from torch import nn

COMPUTE = torch.bfloat16
SEQUENCE = 2048


class Block(nn.Module):
    """A block of Llama: grouped-query attention with rotary positions, and a gated MLP."""

    def __init__(self, width, heads, groups, hidden):
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head, bias=False)
        self.value = nn.Linear(width, groups * self.head, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x, cos, sin):
        samples, length, width = x.shape

        def heads(projected, number):
            return projected.view(samples, length, number, self.head).transpose(1, 2)

        h = self.norm(x)
        query = rotated(heads(self.query(h), self.heads), cos, sin)
        key = rotated(heads(self.key(h), self.groups), cos, sin)
        value = heads(self.value(h), self.groups)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        x = x + self.output(mixed.transpose(1, 2).reshape(samples, length, width))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Stack(nn.Module):
    def __init__(self, options):
        super().__init__()
        hidden = 32 * math.ceil(3.5 * options.width / 32)
        heads, groups = options.heads, max(1, options.heads // 4)
        self.blocks = nn.ModuleList(
            Block(options.width, heads, groups, hidden) for _ in range(options.layers)
        )

    def forward(self, x, cos, sin):
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def build(options, dtype=torch.float32):
    torch.manual_seed(0)
    with torch.device(options.device):
        return Stack(options).to(dtype)


def make_inputs(tokens, options):
    """A batch of sequences, the rotary tables, and the gradient that backward begins with.

    It is small: what a benchmark takes for weights may be gradients of an earlier step.
    """
    generator = torch.Generator(options.device).manual_seed(1)
    length = min(tokens, SEQUENCE)
    draw = partial(torch.randn, generator=generator, device=options.device, dtype=COMPUTE)
    x, grad = (draw(tokens // length, length, options.width) for _ in range(2))
    frequency = 500_000.0 ** -torch.arange(0, 1, 2 * options.heads / options.width)
    angles = torch.outer(torch.arange(length), frequency).to(options.device)
    return (x, angles.cos().to(COMPUTE), angles.sin().to(COMPUTE)), 1e-6 * grad / tokens
