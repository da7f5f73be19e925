# SPDX-License-Identifier: Apache-2.0
"""Models from Hugging Face's ``config.json``, without torch and without transformers."""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError, check_whole
from fullshard.core.text import did_you_mean
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.named import named_model
from fullshard.plan.model.shape import (
    GEMMA,
    GPT2,
    LLAMA,
    OLMO,
    Experts,
    HeadNorm,
    Latent,
    Norm,
    Shape,
)

__all__ = ["ARCHITECTURES", "model_from_config", "read_model"]

_LARGEST_BYTES = 4 << 20  # of a config.json; the largest in use are far below

Config = Mapping[str, Any]


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    file = resources.files("fullshard.plan.model").joinpath("config_defaults.toml")
    return tomllib.loads(file.read_text("utf-8"))


class _Fields:
    """The fields of a config; what it leaves out is what its class in transformers takes."""

    def __init__(self, config: Config):
        self._kind = str(config.get("model_type"))
        defaults = _defaults().get(self._kind, {})
        self._told = config, {key: value for key, value in defaults.items() if key not in config}

    def get(self, *names: str, default: Any = None) -> Any:
        found = (told[name] for told in self._told for name in names if told.get(name) is not None)
        return next(found, default)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least``; raises `ConfigurationError` if it is missing or not."""
        value: int = self.get(*names, default=default)
        check_whole(f"config.json of a {self._kind}: {' or '.join(names)}", value, least)
        return value

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def whole_every(self, every: int) -> int:
        """Each so many-th layer has full attention: as its list of layers says, else ``every``."""
        kinds = self.get("layer_types")
        if not isinstance(kinds, list) or not kinds:
            return every
        return kinds.index("full_attention") + 1 if "full_attention" in kinds else 0


def _llama_like(fields: _Fields, **more: Any) -> Shape:
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    bias = fields.flag("attention_bias")
    window = 0
    if fields.get("use_sliding_window", default=True):
        window = fields.whole("sliding_window", default=0, least=0)
    told: dict[str, Any] = {
        "layers": fields.whole("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", default=heads),
        "head_width": fields.whole("head_dim", default=max(1, width // heads)),
        "hidden": fields.whole("intermediate_size"),
        "vocab": fields.whole("vocab_size"),
        "context": fields.whole("max_position_embeddings", default=2048),
        "tied": fields.flag("tie_word_embeddings"),
        "bias": fields.flag("mlp_bias"),
        "qkv_bias": bias,
        "out_bias": bias,
        "window": window,
        "whole_every": fields.whole_every(0) if window else 0,
        "naming": LLAMA,
    }
    return Shape(**{**told, **more})


def _qwen2(fields: _Fields) -> Shape:
    return _llama_like(fields, qkv_bias=True)


def _qwen3(fields: _Fields) -> Shape:
    return _llama_like(fields, query_key_norm=HeadNorm.HEAD)


def _gemma2(fields: _Fields, **more: Any) -> Shape:
    every = fields.whole_every(2)
    return _llama_like(fields, naming=GEMMA, norm=Norm.WIDE_RMS, whole_every=every, **more)


def _gemma3(fields: _Fields) -> Shape:
    every = fields.whole_every(fields.whole("sliding_window_pattern", default=6))
    shape = _gemma2(fields, query_key_norm=HeadNorm.HEAD)
    return replace(shape, whole_every=every)


def _olmo2(fields: _Fields) -> Shape:
    whole = HeadNorm.WHOLE
    return _llama_like(fields, naming=OLMO, norm=Norm.WIDE_RMS, query_key_norm=whole)


def _gemma(fields: _Fields) -> Shape:
    return _llama_like(fields, norm=Norm.WIDE_RMS)


def _mixtral(fields: _Fields) -> Shape:
    return _llama_like(fields, experts=_experts(fields, "intermediate_size"))


def _experts(fields: _Fields, hidden: str, shared: int = 0, dense_blocks: int = 0) -> Experts:
    return Experts(
        fields.whole("num_experts", "num_local_experts", "n_routed_experts"),
        fields.whole("num_experts_per_tok"),
        fields.whole(hidden),
        shared,
        dense_blocks,
    )


def _dense_layers(fields: _Fields, every: str) -> int:
    """The number of layers without experts, which are taken for the first."""
    layers, step = fields.whole("num_hidden_layers"), fields.whole(every, default=1)
    sparse = fields.get("moe_layers")
    if isinstance(sparse, list):
        return max(0, layers - len(sparse))
    told = fields.get("mlp_only_layers", default=[])
    plain = told if isinstance(told, list) else []
    return sum(layer in plain or (layer + 1) % step != 0 for layer in range(layers))


def _qwen2_moe(fields: _Fields) -> Shape:
    shared = fields.whole("shared_expert_intermediate_size")
    dense = _dense_layers(fields, "decoder_sparse_step")
    experts = _experts(fields, "moe_intermediate_size", shared, dense)
    return _llama_like(fields, qkv_bias=True, experts=replace(experts, gated_shared=True))


def _qwen3_moe(fields: _Fields) -> Shape:
    dense = _dense_layers(fields, "decoder_sparse_step")
    experts = _experts(fields, "moe_intermediate_size", 0, dense)
    return _llama_like(fields, query_key_norm=HeadNorm.HEAD, experts=experts)


def _llama4(fields: _Fields) -> Shape:
    """Three of four blocks look back within chunks, on average half as far as a window would."""
    hidden = fields.whole("intermediate_size")
    dense = _dense_layers(fields, "interleave_moe_layer_step")
    return _llama_like(
        fields,
        hidden=fields.whole("intermediate_size_mlp"),
        experts=_experts(fields, "intermediate_size", hidden, dense),
        query_key_norm=HeadNorm.BARE if fields.flag("use_qk_norm") else HeadNorm.NONE,
        window=fields.whole("attention_chunk_size", default=0, least=0) // 2,
        whole_every=fields.whole_every(4),
    )


def _gpt_oss(fields: _Fields) -> Shape:
    return _llama_like(
        fields,
        experts=replace(_experts(fields, "intermediate_size"), bias=True),
        whole_every=fields.whole_every(2),
        sinks=True,
        norm=Norm.WIDE_RMS,
    )


def _deepseek(fields: _Fields) -> Shape:
    """Version 1 with plain attention, later ones with latent."""
    hidden = fields.whole("moe_intermediate_size")
    shared = hidden * fields.whole("n_shared_experts", default=0, least=0)
    dense = fields.whole("first_k_dense_replace", default=0, least=0)
    experts = _experts(fields, "moe_intermediate_size", shared, dense)
    told: dict[str, Any] = {"experts": replace(experts, wide_router=True)}
    if fields.get("kv_lora_rank"):
        turned = fields.whole("qk_rope_head_dim")
        told |= {
            "kv_heads": fields.whole("num_attention_heads"),
            "head_width": fields.whole("qk_nope_head_dim") + turned,
            "latent": Latent(
                fields.whole("q_lora_rank", default=0, least=0),
                fields.whole("kv_lora_rank"),
                turned,
                fields.whole("v_head_dim"),
            ),
        }
    return _llama_like(fields, **told)


def _gpt2(fields: _Fields) -> Shape:
    width, heads = fields.whole("n_embd"), fields.whole("n_head")
    return Shape(
        layers=fields.whole("n_layer"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        hidden=fields.whole("n_inner", default=4 * width),
        vocab=fields.whole("vocab_size"),
        context=fields.whole("n_positions", "n_ctx", default=1024),
        gated=False,
        tied=True,
        bias=True,
        norm=Norm.LAYER,
        learned_positions=True,
        rotary=False,
        gelu_parts=3 if fields.get("activation_function", default="gelu_new") == "gelu_new" else 0,
        naming=GPT2,
    )


def _neox(fields: _Fields) -> Shape:
    return _llama_like(fields, gated=False, bias=True, norm=Norm.LAYER, window=0, qkv_bias=True)


def _starcoder2(fields: _Fields) -> Shape:
    return _llama_like(fields, gated=False, bias=fields.flag("use_bias"), norm=Norm.LAYER)


# Their builders, and the prefix of their classes in transformers.
_KNOWN: Mapping[str, tuple[Callable[[_Fields], Shape], str]] = {
    "llama": (_llama_like, "Llama"),
    "mistral": (_llama_like, "Mistral"),
    "phi3": (_llama_like, "Phi3"),
    "granite": (_llama_like, "Granite"),
    "smollm3": (_llama_like, "SmolLM3"),
    "olmo2": (_olmo2, "Olmo2"),
    "qwen2": (_qwen2, "Qwen2"),
    "qwen3": (_qwen3, "Qwen3"),
    "gemma": (_gemma, "Gemma"),
    "gemma2": (_gemma2, "Gemma2"),
    "gemma3": (_gemma3, "Gemma3"),
    "gemma3_text": (_gemma3, "Gemma3"),
    "mixtral": (_mixtral, "Mixtral"),
    "qwen2_moe": (_qwen2_moe, "Qwen2Moe"),
    "qwen3_moe": (_qwen3_moe, "Qwen3Moe"),
    "llama4": (_llama4, "Llama4Text"),
    "llama4_text": (_llama4, "Llama4Text"),
    "gpt_oss": (_gpt_oss, "GptOss"),
    "deepseek": (_deepseek, "Deepseek"),
    "deepseek_v2": (_deepseek, "DeepseekV2"),
    "deepseek_v3": (_deepseek, "DeepseekV3"),
    "gpt2": (_gpt2, "GPT2"),
    "gpt_neox": (_neox, "GPTNeoX"),
    "starcoder2": (_starcoder2, "Starcoder2"),
}
ARCHITECTURES = tuple(_KNOWN)
"""The families that are read, by the ``model_type`` of their config.json."""

_BLOCKS = {"gpt2": "Block", "gpt_neox": "Layer"}
_EXPERTS = {"mixtral": "SparseMoeBlock", "deepseek_v2": "Moe", "llama4": "Moe", "gpt_oss": "MLP"}


def _classes(kind: str) -> tuple[str, str, str]:
    """The classes that transformers has for a block, its attention and its feed-forward."""
    prefix = _KNOWN[kind][1]
    kind = kind.removesuffix("_text")
    feed_forward = _EXPERTS.get(kind, "MLP")
    if kind.endswith("_moe"):
        feed_forward = "SparseMoeBlock"
    elif kind.startswith("deepseek"):
        feed_forward = _EXPERTS.get(kind, "MoE")
    block = _BLOCKS.get(kind, "DecoderLayer")
    return f"{prefix}{block}", f"{prefix}Attention", f"{prefix}{feed_forward}"


def model_from_config(config: Config, name: str) -> Decoder:
    """The model that a config.json describes; of one that also sees, the part that reads text.

    Raises `ConfigurationError` for a ``model_type`` that is not in `ARCHITECTURES`, with the
    nearest that is, for quantized weights, and for sizes that are no whole numbers.
    """
    kind = str(config.get("model_type"))
    if kind not in _KNOWN:
        hint = did_you_mean(kind, _KNOWN)
        if any(name in config for name in ("text_config", "vision_config", "encoder", "decoder")):
            hint = "a model of several; "
        raise ConfigurationError(
            f"config.json has model_type {kind!r}: {hint}known are {', '.join(_KNOWN)}; any "
            "other model, encoder-decoders included, can be recorded: "
            "see plan_module in docs/planner.md"
        )
    quantized = config.get("quantization_config")
    if quantized:
        how = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigurationError(
            f"config.json describes weights quantized by {how}, which rest otherwise than planned; "
            "take the model's config.json before quantization, or leave out quantization_config"
        )
    if kind in ("gemma3", "llama4"):
        inside = config.get("text_config") or {}
        if not isinstance(inside, Mapping):
            raise ConfigurationError(f"text_config must be an object, got {inside!r}")
        config = {**inside, "model_type": f"{kind}_text"}
    return Decoder(name, _KNOWN[kind][0](_Fields(config)), _classes(kind))


def read_model(text: str) -> Decoder:
    """The model of a preset's name, or of a config.json (or the folder that one lies in)."""
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        return named_model(text)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ConfigurationError(f"{path} is too large for a model's config.json")
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} holds no JSON object")
    name = config.get("_name_or_path") or path.resolve().parent.name
    return model_from_config(config, str(name))
