# SPDX-License-Identifier: Apache-2.0
"""A block of transformers' Llama, without rotary positions, and the bytes that it keeps."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HIDDEN, TOKENS, HEADS, KV_HEADS = 64, 160, 128, 4, 2
HEAD = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden):
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class Block(nn.Module):
    """Norm, attention, norm, gated feed-forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = RMSNorm(), RMSNorm()
        for name, into, out in (
            ("q", WIDTH, WIDTH),
            ("k", WIDTH, KV_HEADS * HEAD),
            ("v", WIDTH, KV_HEADS * HEAD),
            ("o", WIDTH, WIDTH),
            ("gate", WIDTH, HIDDEN),
            ("up", WIDTH, HIDDEN),
            ("down", HIDDEN, WIDTH),
        ):
            setattr(self, name, nn.Linear(into, out, bias=False))

    def attend(self, hidden):
        normed = self.first(hidden)
        heads = [
            each(normed).view(1, TOKENS, -1, HEAD).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return hidden + self.o(seen.transpose(1, 2).reshape(1, TOKENS, WIDTH))

    def forward(self, hidden):
        hidden = self.attend(hidden)
        normed = self.second(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def saved_bytes(forward, parameters):
    """Bytes of all storages that ``forward`` saves for backward, but of those of parameters."""
    storages = {}
    own = {each.untyped_storage()._cdata for each in parameters}

    def pack(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        forward()
    return sum(each.untyped_storage().nbytes() for key, each in storages.items() if key not in own)
