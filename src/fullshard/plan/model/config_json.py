# SPDX-License-Identifier: Apache-2.0
"""Models from Hugging Face's ``config.json``, without torch and without transformers."""

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError, check_whole
from fullshard.core.text import did_you_mean
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.named import named_model
from fullshard.plan.model.shape import Shape

_LARGEST_BYTES = 4 << 20  # of a config.json; the largest in use are far below
_TEXT = {"gemma3": "gemma3_text", "llama4": "llama4_text"}  # what reads text of models that see

Config = Mapping[str, Any]


_FILE = resources.files("fullshard.plan.model").joinpath("families.toml")
_FAMILIES: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text("utf-8"))
ARCHITECTURES = (*_FAMILIES, *_TEXT)
"""The families that are read, by the ``model_type`` of their config.json."""


class _Fields:
    """The fields of a config; what it leaves out is what its class in transformers takes."""

    def __init__(self, config: Config, kind: str):
        self._kind = kind
        defaults = _FAMILIES[kind].get("defaults", {})
        self._told = config, {key: value for key, value in defaults.items() if key not in config}

    def get(self, *names: str, default: Any = None) -> Any:
        found = (told[name] for told in self._told for name in names if told.get(name) is not None)
        return next(found, default)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from ``least``; raises `ConfigurationError` if it is missing or not."""
        value: int = self.get(*names, default=default)
        said = [name for told in self._told for name in names if name in told] or names
        check_whole(f"config.json of a {self._kind}: {said[0]}", value, least)
        return value


def _shape(fields: _Fields, family: Mapping[str, Any]) -> Shape:
    width = fields.whole("hidden_size", "n_embd")
    heads = fields.whole("num_attention_heads", "n_head")
    biased = bool(fields.get("attention_bias"))
    told: dict[str, Any] = {
        "layers": fields.whole("num_hidden_layers", "n_layer"),
        "width": width,
        "heads": heads,
        "kv_heads": fields.whole("num_key_value_heads", default=heads),
        "head_width": fields.whole("head_dim", default=max(1, width // heads)),
        "hidden": fields.whole(
            "intermediate_size_mlp", "intermediate_size", "n_inner", default=4 * width
        ),
        "vocab": fields.whole("vocab_size"),
        "context": fields.whole("max_position_embeddings", "n_positions", "n_ctx", default=2048),
        "tied": bool(fields.get("tie_word_embeddings")),
        "bias": bool(fields.get("mlp_bias", "use_bias")),
        "qkv_bias": biased,
        "out_bias": biased,
        "dropout": bool(fields.get("resid_pdrop")),
        "naming": "LLAMA",
        **family.get("shape", {}),
        **_window(fields, family),
        **_latent(fields, heads),
    }
    if not told.get("gated", True) and fields.get("activation_function") == "gelu_new":
        told["gelu_parts"] = 3  # squares, tangents and halves, kernel by kernel
    if "experts" in family:
        told["experts"] = _experts(fields, family["experts"])
    return Shape.of(told)


def _window(fields: _Fields, family: Mapping[str, Any]) -> dict[str, int]:
    """Read the span that attention looks back, and the layers that look all the way.

    Chunks count as half of a window: that is how far one looks back in them on average.
    """
    window = fields.whole("sliding_window", default=0, least=0)
    window = fields.whole("attention_chunk_size", default=2 * window, least=0) // 2
    if not window or not fields.get("use_sliding_window", default=True):
        return {"window": 0, "whole_every": 0}
    usual = family.get("shape", {}).get("whole_every", 0)
    every = fields.whole("sliding_window_pattern", default=usual, least=0)
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    return {"window": window, "whole_every": every}


def _latent(fields: _Fields, heads: int) -> dict[str, Any]:
    """Attention whose keys and values come from few features, as DeepSeek has since version 2."""
    if not fields.get("kv_lora_rank"):
        return {}
    turned = fields.whole("qk_rope_head_dim")
    latent = {
        "query_rank": fields.whole("q_lora_rank", default=0, least=0),
        "kv_rank": fields.whole("kv_lora_rank"),
        "turned": turned,
        "value": fields.whole("v_head_dim"),
    }
    width = fields.whole("qk_nope_head_dim") + turned
    return {"kv_heads": heads, "head_width": width, "latent": latent}


def _experts(fields: _Fields, names: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without experts, wherever they are, are taken for the first."""
    layers, hidden = fields.whole("num_hidden_layers"), fields.whole(names["hidden"])
    shared = fields.whole(names["shared"]) if "shared" in names else 0
    if "times" in names:
        shared = hidden * fields.whole(names["times"], default=0, least=0)
    dense = fields.whole(names["first"], default=0, least=0) if "first" in names else 0
    if "every" in names:
        step = fields.whole(names["every"], default=1)
        plain = fields.get("mlp_only_layers", default=[])
        plain = plain if isinstance(plain, list) else []
        dense = sum(layer in plain or (layer + 1) % step != 0 for layer in range(layers))
    sparse = fields.get("moe_layers")
    if isinstance(sparse, list):
        dense = max(0, layers - len(sparse))
    return {
        "count": fields.whole("num_experts", "num_local_experts", "n_routed_experts"),
        "active": fields.whole("num_experts_per_tok"),
        "hidden": hidden,
        "shared": shared,
        "dense_blocks": dense,
        **{name: value for name, value in names.items() if value is True},
    }


def model_from_config(config: Config, name: str) -> Decoder:
    """The model that a config.json describes; of one that also sees, the part that reads text.

    Raises `ConfigurationError` for a ``model_type`` that is not in `ARCHITECTURES`, with the
    nearest that is, for quantized weights, and for sizes that are no whole numbers.
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
    quantized = config.get("quantization_config")
    if quantized:
        how = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigurationError(
            f"config.json describes weights quantized by {how}, which rest otherwise than planned; "
            "take the model's config.json before quantization, or leave out quantization_config"
        )
    if kind in _TEXT:
        config = config.get("text_config") or {}
        if not isinstance(config, Mapping):
            raise ConfigurationError(f"text_config must be an object, got {config!r}")
        kind = _TEXT[kind]
    family = _FAMILIES[kind]
    block, attention, feed_forward = family["classes"]
    shape = _shape(_Fields(config, kind), family)
    return Decoder(name, shape, (block, attention, feed_forward))


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
