# SPDX-License-Identifier: Apache-2.0
"""The models that `fullshard train` knows: decoder-only transformers and a small digit reader.

Plain PyTorch: nothing in here knows that parameters will be sharded.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fullshard.core.presets import Transformer


class Rotary(nn.Module):
    """Rotary positions (arXiv:2104.09864): pairs of a head's features turn with the position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, context: int, theta: float) -> None:
        super().__init__()
        frequency = theta ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
        angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """Turn ``heads`` (batch, heads, positions, head_width); same shape and dtype."""
        positions = heads.shape[-2]
        cos, sin = self.cos[:positions], self.sin[:positions]
        first, second = heads.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(heads.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        kv_width = shape.kv_heads * shape.head_width
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, kv_width, bias=False)
        self.value = nn.Linear(shape.width, kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Mix positions of ``x`` (batch, positions, width), each seeing itself and those before."""
        query = rotary(_split(self.query(x), self.heads))
        key = rotary(_split(self.key(x), self.kv_heads))
        value = _split(self.value(x), self.kv_heads)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _split(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` (batch, positions, width) on its own."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class MixtureOfExperts(nn.Module):
    """Feed-forwards of which each position takes the two that a router gives the most weight.

    Nothing is dropped. An expert that no position here has chosen does not run here.
    """

    def __init__(self, shape: Transformer, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(shape) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``x`` (batch, positions, width) on its own."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).float().softmax(-1).topk(2)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, choice = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(flat[rows]) * weights[rows, choice, None])
        return mixed.view_as(x)


class Block(nn.Module):
    """One layer: attention, then feed-forward, each normed before and added to its input."""

    def __init__(self, shape: Transformer, experts: int = 0) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = MixtureOfExperts(shape, experts) if experts else FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Refine ``x`` (batch, positions, width)."""
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only language model of a preset's shape, for up to ``context`` positions.

    With ``experts`` each block has that many feed-forwards, of which a position takes two.
    """

    def __init__(self, shape: Transformer, context: int | None = None, experts: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.rotary = Rotary(shape.head_width, context or shape.context, shape.rope_theta)
        self.blocks = nn.ModuleList(Block(shape, experts) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.output = nn.Linear(shape.width, shape.vocab, bias=False)
        self._initialise(shape.layers)
        if shape.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, positions, vocab) of the token after ``tokens``."""
        return self._logits(self.embedding(tokens))

    def _logits(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.output(self.norm(x))  # type: ignore[no-any-return]

    def _initialise(self, layers: int) -> None:
        # Matrices that write to the residual stream start smaller, so that its variance does not
        # grow with depth (GPT-2, section 2.3).
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attention.out", ".down"))
                scale = 1 / math.sqrt(2 * layers) if residual else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)


class PictureTower(nn.Module):
    """Two convolutions and a linear layer that make one position of a 28 x 28 picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, stride=2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, stride=2)
        self.out = nn.Linear(32 * 6 * 6, width)

    def forward(self, images: Tensor) -> Tensor:
        """Positions (n, width) of ``images`` (n, 1, 28, 28)."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        return self.out(x.flatten(1))  # type: ignore[no-any-return]


class IllustratedGPT(GPT):
    """A language model that some texts show a picture to: at their first position."""

    def __init__(self, shape: Transformer, context: int | None = None) -> None:
        super().__init__(shape, context)
        self.tower = PictureTower(shape.width)

    def forward(
        self, tokens: Tensor, images: Tensor | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Return logits (batch, positions, vocab) of the token after ``tokens``.

        ``images`` (n, 1, 28, 28) belong to n ``rows`` of ``tokens``; without any the tower does not
        run.
        """
        x = self.embedding(tokens)
        if images is not None and rows is not None and len(images):
            first = torch.zeros_like(rows)
            x = x.index_put((rows, first), self.tower(images), accumulate=True)
        return self._logits(x)


class DigitNet(nn.Module):
    """Two convolutions and two linear layers for 28 x 28 digits; 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities (batch, 10) of ``images`` (batch, 1, 28, 28)."""
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)
