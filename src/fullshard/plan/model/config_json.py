# SPDX-License-Identifier: Apache-2.0
"""Models from Hugging Face's ``config.json``, without torch and without transformers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError, check_whole
from fullshard.core.text import did_you_mean
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.named import named_model
from fullshard.plan.model.shape import GPT2, LLAMA, Experts, Latent, Norm, Shape

__all__ = ["ARCHITECTURES", "model_from_config", "read_model"]

_LARGEST_BYTES = 4 << 20  # of a config.json; the largest in use are far below

Config = Mapping[str, Any]


class _Fields:
    """The fields of a config, looked up by any of the names that families give them."""

    def __init__(self, config: Config):
        self.config = config

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        return default

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least``; raises `ConfigurationError` if it is missing or not."""
        value: int = self.get(*names, default=default)
        check_whole(
            f"config.json of a {self.config.get('model_type')}: {' or '.join(names)}",
            value,
            least,
        )
        return value


def _llama_like(fields: _Fields, **more: Any) -> Shape:
    width, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
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
        "tied": bool(fields.get("tie_word_embeddings", default=False)),
        "bias": bool(fields.get("mlp_bias", default=False)),
        "qkv_bias": bool(fields.get("attention_bias", default=False)),
        "window": window,
        "naming": LLAMA,
    }
    return Shape(**{**told, **more})


def _qwen2(fields: _Fields) -> Shape:
    return _llama_like(fields, qkv_bias=True)


def _qwen3(fields: _Fields) -> Shape:
    return _llama_like(fields, query_key_norm=True)


def _gemma(fields: _Fields) -> Shape:
    return _llama_like(fields, tied=bool(fields.get("tie_word_embeddings", default=True)))


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


def _dense_layers(fields: _Fields) -> int:
    """The number of layers without experts, which are taken for the first."""
    layers, every = (
        fields.whole("num_hidden_layers"),
        fields.whole("decoder_sparse_step", default=1),
    )
    told = fields.get("mlp_only_layers", default=[])
    plain = told if isinstance(told, list) else []
    return sum(layer in plain or (layer + 1) % every != 0 for layer in range(layers))


def _qwen2_moe(fields: _Fields) -> Shape:
    shared = fields.whole("shared_expert_intermediate_size")
    experts = _experts(fields, "moe_intermediate_size", shared, _dense_layers(fields))
    experts = replace(experts, gated_shared=True)
    return _llama_like(fields, qkv_bias=True, experts=experts)


def _qwen3_moe(fields: _Fields) -> Shape:
    experts = _experts(fields, "moe_intermediate_size", 0, _dense_layers(fields))
    return _llama_like(fields, query_key_norm=True, experts=experts)


def _deepseek(fields: _Fields) -> Shape:
    """Version 1 with plain attention, later ones with latent."""
    hidden = fields.whole("moe_intermediate_size")
    shared = hidden * fields.whole("n_shared_experts", default=0, least=0)
    dense = fields.whole("first_k_dense_replace", default=0, least=0)
    told: dict[str, Any] = {
        "experts": _experts(fields, "moe_intermediate_size", shared, dense),
    }
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
        naming=GPT2,
    )


def _neox(fields: _Fields) -> Shape:
    return _llama_like(fields, gated=False, bias=True, norm=Norm.LAYER, window=0, qkv_bias=True)


def _starcoder2(fields: _Fields) -> Shape:
    bias = bool(fields.get("use_bias", default=True))
    tied = bool(fields.get("tie_word_embeddings", default=True))
    return _llama_like(fields, gated=False, bias=bias, norm=Norm.LAYER, tied=tied)


ARCHITECTURES: Mapping[str, Callable[[_Fields], Shape]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "phi3": _llama_like,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek": _deepseek,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "starcoder2": _starcoder2,
}
"""Families by the ``model_type`` of their config.json."""

_PREFIXES = {"gpt2": "GPT2", "gpt_neox": "GPTNeoX"}
_BLOCKS = {"gpt2": "Block", "gpt_neox": "Layer"}


def _classes(kind: str) -> tuple[str, str, str]:
    """The classes that transformers has for a block, its attention and its feed-forward."""
    prefix = _PREFIXES.get(kind, "".join(part.capitalize() for part in kind.split("_")))
    feed_forward = f"{prefix}MLP"
    if kind == "mixtral" or kind.endswith("_moe"):
        feed_forward = f"{prefix}SparseMoeBlock"
    elif kind.startswith("deepseek"):
        feed_forward = f"{prefix}Moe" if kind == "deepseek_v2" else f"{prefix}MoE"
    return f"{prefix}{_BLOCKS.get(kind, 'DecoderLayer')}", f"{prefix}Attention", feed_forward


def model_from_config(config: Config, name: str) -> Decoder:
    """The model that a config.json describes.

    Raises `ConfigurationError` for a ``model_type`` that is not in `ARCHITECTURES`, with the
    nearest that is, and for sizes that are missing or no whole numbers.
    """
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        hint = did_you_mean(kind, ARCHITECTURES)
        if any(name in config for name in ("text_config", "vision_config", "encoder", "decoder")):
            hint = "a model of several; "
        raise ConfigurationError(
            f"config.json has model_type {kind!r}: {hint}known are {', '.join(ARCHITECTURES)}; any "
            "other model, encoder-decoders included, can be recorded: "
            "see plan_module in docs/planner.md"
        )
    shape = ARCHITECTURES[kind](_Fields(config))
    return Decoder(name, shape, _classes(kind))


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
