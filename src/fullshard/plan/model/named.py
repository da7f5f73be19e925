# SPDX-License-Identifier: Apache-2.0
"""Models by name: the presets that training shares, and published families beside them."""

from dataclasses import replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS
from fullshard.core.text import did_you_mean
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import LLAMA, MPT, Experts, Latent, Naming, Norm, Shape, shape_of

__all__ = ["MODEL_NAMES", "named_model"]


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, context: int
) -> Shape:
    head_width = width // heads
    return Shape(layers, width, heads, kv_heads, head_width, hidden, vocab, context, naming=LLAMA)


def _qwen3(layers: int, width: int, heads: int, hidden: int, *, tied: bool = False) -> Shape:
    shape = _llama(layers, width, heads, 8, hidden, 151_936, 8192)
    return replace(shape, head_width=128, tied=tied, query_key_norm=True)


def _gpt3(layers: int, width: int, heads: int) -> Shape:
    return replace(_mpt(layers, width, heads), vocab=50_257, naming=Naming())


def _mpt(layers: int, width: int, heads: int) -> Shape:
    return Shape(
        layers,
        width,
        heads,
        heads,
        width // heads,
        4 * width,
        vocab=50_368,
        context=2048,
        gated=False,
        tied=True,
        bias=True,
        norm=Norm.LAYER,
        learned_positions=True,
        rotary=False,
        naming=MPT,
    )


_SHAPES: dict[str, Shape] = {
    # Touvron et al., arXiv:2302.13971 and arXiv:2307.09288; 34B: arXiv:2308.12950.
    "llama-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 2048),
    "llama-13b": _llama(40, 5120, 40, 40, 13_824, 32_000, 2048),
    "llama-33b": _llama(60, 6656, 52, 52, 17_920, 32_000, 2048),
    "llama-65b": _llama(80, 8192, 64, 64, 22_016, 32_000, 2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, 32_000, 4096),
    "llama2-13b": _llama(40, 5120, 40, 40, 13_824, 32_000, 4096),
    "llama2-34b": _llama(48, 8192, 64, 8, 22_016, 32_000, 4096),
    "llama2-70b": _llama(80, 8192, 64, 8, 28_672, 32_000, 4096),
    # "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.
    "llama3-405b": _llama(126, 16_384, 128, 8, 53_248, 128_256, 8192),
    "llama3.2-1b": replace(_llama(16, 2048, 32, 8, 8192, 128_256, 8192), tied=True),
    "llama3.2-3b": replace(_llama(28, 3072, 24, 8, 8192, 128_256, 8192), tied=True),
    # Qwen2.5 technical report (arXiv:2412.15115) and the configurations published with it.
    "qwen2.5-7b": replace(_llama(28, 3584, 28, 4, 18_944, 152_064, 8192), qkv_bias=True),
    "qwen2.5-14b": replace(_llama(48, 5120, 40, 8, 13_824, 152_064, 8192), qkv_bias=True),
    "qwen2.5-32b": replace(_llama(64, 5120, 40, 8, 27_648, 152_064, 8192), qkv_bias=True),
    "qwen2.5-72b": replace(_llama(80, 8192, 64, 8, 29_568, 152_064, 8192), qkv_bias=True),
    # Qwen3 technical report (arXiv:2505.09388), table 1, and its configurations.
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "qwen3-30b-a3b": replace(_qwen3(48, 2048, 32, 6144), kv_heads=4, experts=Experts(128, 8, 768)),
    "qwen3-235b-a22b": replace(
        _qwen3(94, 4096, 64, 12_288), kv_heads=4, experts=Experts(128, 8, 1536)
    ),
    # DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437).
    "deepseek-v2-lite": replace(
        _llama(27, 2048, 16, 16, 10_944, 102_400, 4096),
        head_width=192,
        latent=Latent(0, 512, 64, 128),
        experts=Experts(64, 6, 1408, 2816, 1),
    ),
    "deepseek-v3": replace(
        _llama(61, 7168, 128, 128, 18_432, 129_280, 4096),
        head_width=192,
        latent=Latent(1536, 512, 64, 128),
        experts=Experts(256, 8, 2048, 2048, 3),
    ),
    # Configurations of mosaicml/llm-foundry, with learned positions and biases as benchmarked.
    "mpt-125m": _mpt(12, 768, 12),
    "mpt-350m": _mpt(24, 1024, 16),
    "mpt-760m": _mpt(24, 1536, 12),
    "mpt-1b": _mpt(24, 2048, 16),
    "mpt-3b": _mpt(32, 2560, 20),
    "mpt-7b": _mpt(32, 4096, 32),
    "mpt-13b": _mpt(40, 5120, 40),
    "mpt-30b": _mpt(48, 7168, 56),
    "mpt-70b": _mpt(80, 8192, 64),
    # Jiang et al., arXiv:2310.06825 and arXiv:2401.04088.
    "mistral-7b": _llama(32, 4096, 32, 8, 14_336, 32_000, 8192),
    "mixtral-8x7b": replace(
        _llama(32, 4096, 32, 8, 14_336, 32_000, 8192), experts=Experts(8, 2, 14_336)
    ),
    # Shen et al., arXiv:2408.13359, and the configuration published with it.
    "powerlm-3b": replace(_llama(40, 2304, 36, 36, 9216, 49_152, 4096), tied=True),
    # Brown et al., arXiv:2005.14165, table 2.1; OPT (arXiv:2205.01068) has the same shapes.
    "gpt3-1.3b": _gpt3(24, 2048, 32),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-30b": _gpt3(48, 7168, 56),
    "gpt3-66b": _gpt3(64, 9216, 72),
    "gpt3-175b": _gpt3(96, 12_288, 96),
}

MODEL_NAMES: tuple[str, ...] = (*TRANSFORMERS, *_SHAPES)
"""All names that `named_model` knows."""


def named_model(name: str) -> Decoder:
    """The model of that name; an unknown one raises `ConfigurationError` with the nearest."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    joined = key.replace("llama-2", "llama2").replace("llama-3", "llama3")
    other = joined.replace("llama3.1-", "llama3-").replace("opt-", "gpt3-")
    other = other.replace("qwen-3", "qwen3").removesuffix("-base")
    for alias in (key, joined, other):
        if alias in _SHAPES:
            return Decoder(alias, _SHAPES[alias])
        if alias in TRANSFORMERS:
            return Decoder(alias, shape_of(TRANSFORMERS[alias]))
    hint = did_you_mean(key, MODEL_NAMES)
    raise ConfigurationError(
        f"unknown model {name!r}: {hint}give a config.json or one of {', '.join(MODEL_NAMES)}"
    )
