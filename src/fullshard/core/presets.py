# SPDX-License-Identifier: Apache-2.0
"""Model shapes as data, with the arithmetic that training and planning share."""

from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import did_you_mean


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


def transformer(name: str) -> Transformer:
    """Look a preset up; an unknown name raises `ConfigurationError` with the nearest one."""
    if name in TRANSFORMERS:
        return TRANSFORMERS[name]
    hint = did_you_mean(name, TRANSFORMERS)
    raise ConfigurationError(
        f"unknown model preset {name!r}: {hint}there are {', '.join(TRANSFORMERS)}"
    )


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
