# SPDX-License-Identifier: Apache-2.0
"""Models by name: the presets that training shares, and published families beside them."""

import re
import tomllib
from importlib import resources
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS
from fullshard.core.text import did_you_mean
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import Shape, shape_of

_SIZES = ("layers", "width", "heads", "kv_heads", "hidden", "vocab", "context")


def _shape(common: dict[str, Any], told: list[Any]) -> Shape:
    sizes = dict(zip(_SIZES, told, strict=False))
    own = told[len(_SIZES)] if len(told) > len(_SIZES) else {}
    fields = {"head_width": sizes["width"] // sizes["heads"], **sizes, **common, **own}
    return Shape.of(fields)


def _shapes() -> dict[str, Shape]:
    file = resources.files("fullshard.plan.model").joinpath("presets.toml")
    families = tomllib.loads(file.read_text("utf-8")).values()
    return {
        name: _shape(family["common"], told)
        for family in families
        for name, told in family.items()
        if name != "common"
    }


_SHAPES = _shapes()

MODEL_NAMES: tuple[str, ...] = (*TRANSFORMERS, *_SHAPES)
"""All names that `named_model` knows."""

# The way from names as they are published to ours.
_ALIASES = (
    (r".*/", ""),  # an organisation
    (r"[_ ]", "-"),
    (r"^meta-", ""),
    (r"-\d{4}(?=-|$)", ""),  # a date
    (r"(-(instruct|chat|base|hf|it|pt|text|4k|8k|128k|v\d+(\.\d+)?))+$", ""),
    (r"^(llama|qwen|gemma|olmo|smollm)-(?=\d(\.\d)?-)", r"\1"),
    (r"^llama3\.[13]", "llama3"),
    (r"^qwen2-", "qwen2.5-"),
    (r"^opt-", "gpt3-"),
    (r"^gpt2$", "gpt2-124m"),
    (r"-code-base$", "-code"),
)


def named_model(name: str) -> Decoder:
    """The model of that name; an unknown one raises `ConfigurationError` with the nearest.

    Names such as ``meta-llama/Llama-3.1-8B-Instruct`` are understood.
    """
    key = name.lower()
    for known in (key, *_rewritten(key)):
        if known in _SHAPES:
            return Decoder(known, _SHAPES[known])
        if known in TRANSFORMERS:
            return Decoder(known, shape_of(TRANSFORMERS[known]))
    hint = did_you_mean(key, MODEL_NAMES)
    raise ConfigurationError(
        f"unknown model {name!r}: {hint}give a config.json or one of {', '.join(MODEL_NAMES)}"
    )


def _rewritten(key: str) -> list[str]:
    found = []
    for pattern, ours in _ALIASES:
        key = re.sub(pattern, ours, key)
        found.append(key)
    return found
