# SPDX-License-Identifier: Apache-2.0
"""Model shapes and accelerators as data, with the arithmetic that training and planning share."""

import difflib
import re
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError

__all__ = [
    "DEVICES",
    "TRANSFORMERS",
    "Device",
    "Transformer",
    "device_named",
    "parameter_numel",
    "training_flops_per_token",
    "transformer",
]


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer: RMSNorm, rotary positions, gated feed-forward, grouped heads.

    ``hidden`` is the width inside the gated feed-forward, which has three matrices. ``heads`` query
    heads share ``kv_heads`` key and value heads. ``context`` is the longest sequence trained on.
    With ``tied`` the output projection is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    context: int
    rope_theta: float = 10_000.0
    tied: bool = False

    @property
    def head_width(self) -> int:
        """The width of one head."""
        return self.width // self.heads


TRANSFORMERS: dict[str, Transformer] = {
    # Bytes as tokens: sizes of our own, for learning and testing on a CPU or one small GPU.
    "nano": Transformer(4, 128, 4, 2, 384, 256, context=256),
    "micro": Transformer(6, 256, 8, 4, 704, 256, context=512),
    "small": Transformer(8, 512, 8, 4, 1408, 256, context=1024),
    # GPT-2's depth, width, heads and vocabulary (Radford et al. 2019) on this architecture. GPT-2's
    # feed-forward has two matrices of 4 x width: three of 8/3 x width hold as many parameters.
    "gpt2-124m": Transformer(12, 768, 12, 12, 2048, 50_257, context=1024, tied=True),
    "gpt2-xl": Transformer(48, 1600, 25, 25, 4272, 50_257, context=1024, tied=True),
    # "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; context of the first release.
    "llama3-8b": Transformer(32, 4096, 32, 8, 14_336, 128_256, 8192, rope_theta=500_000.0),
    "llama3-70b": Transformer(80, 8192, 64, 8, 28_672, 128_256, 8192, rope_theta=500_000.0),
}


@dataclass(frozen=True)
class Device:
    """An accelerator: dense bf16 peak (no sparsity) in FLOP/s and memory in bytes.

    ``matches`` are the words, in small letters, that the driver's name for it has.
    """

    matches: frozenset[str]
    bf16_flops: float
    memory_bytes: int
    source: str


_GB = 10**9


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The first match counts, so the more specific name comes first.
DEVICES: dict[str, Device] = {
    "A100-40GB": Device(_words("a100 40gb"), 312e12, 40 * _GB, "NVIDIA A100 data sheet"),
    "A100-80GB": Device(_words("a100"), 312e12, 80 * _GB, "NVIDIA A100 data sheet"),
    "H200": Device(_words("h200"), 989.4e12, 141 * _GB, "NVIDIA H200 data sheet, SXM"),
    "H100-PCIe": Device(_words("h100 pcie"), 756e12, 80 * _GB, "NVIDIA H100 data sheet, PCIe"),
    "H100-NVL": Device(_words("h100 nvl"), 835e12, 94 * _GB, "NVIDIA H100 data sheet, NVL"),
    "H100-SXM": Device(_words("h100"), 989.4e12, 80 * _GB, "NVIDIA H100 data sheet, SXM"),
    "B200": Device(_words("b200"), 2250e12, 180 * _GB, "NVIDIA HGX B200 data sheet"),
    "L40S": Device(_words("l40s"), 362.05e12, 48 * _GB, "NVIDIA L40S data sheet"),
    "L4": Device(_words("l4"), 121e12, 24 * _GB, "NVIDIA L4 data sheet"),
    "MI300X": Device(_words("mi300x"), 1307.4e12, 192 * _GB, "AMD Instinct MI300X data sheet"),
}


def transformer(name: str) -> Transformer:
    """Look a preset up; an unknown name raises `ConfigurationError` with the nearest one."""
    if name in TRANSFORMERS:
        return TRANSFORMERS[name]
    near = difflib.get_close_matches(name, TRANSFORMERS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigurationError(
        f"unknown model preset {name!r}: {hint}there are {', '.join(TRANSFORMERS)}"
    )


def device_named(reported: str) -> Device | None:
    """The device of a driver's name such as ``NVIDIA H100 80GB HBM3``, or None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", reported.lower()))
    return next((device for device in DEVICES.values() if device.matches <= words), None)


def parameter_numel(shape: Transformer) -> int:
    """The number of parameters of a model of this shape."""
    kv_width = shape.kv_heads * shape.head_width
    attention = 2 * shape.width * shape.width + 2 * shape.width * kv_width
    feed_forward = 3 * shape.width * shape.hidden
    norms = 2 * shape.width
    embeddings = shape.vocab * shape.width * (1 if shape.tied else 2)
    return shape.layers * (attention + feed_forward + norms) + shape.width + embeddings


def training_flops_per_token(shape: Transformer, context: int) -> float:
    """FLOPs of forward and backward for one token at sequences of ``context`` tokens.

    6 for every parameter that multiplies (an untied input embedding is looked up, not multiplied)
    plus 12 * layers * width * context for attention, as in PaLM (arXiv:2204.02311), appendix B. The
    causal mask is not discounted and recomputation is not counted there, nor here.
    """
    multiplied = parameter_numel(shape)
    if not shape.tied:
        multiplied -= shape.vocab * shape.width
    return 6.0 * multiplied + 12.0 * shape.layers * shape.width * context
