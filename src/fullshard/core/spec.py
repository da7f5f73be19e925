# SPDX-License-Identifier: Apache-2.0
"""Descriptions of parameters to shard, without a framework."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.core.errors import ConfigurationError

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes of one element, by the dtype names that torch, numpy and JAX share."""


def item_bytes(dtype: str) -> int:
    """Bytes of one element of ``dtype``; an unknown name raises `ConfigurationError`."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        known = ", ".join(ITEM_BYTES)
        raise ConfigurationError(f"unknown dtype {dtype!r}; known: {known}") from None


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: its name in the plain model, global shape, dtype name, and if it is trained.

    ``aliases`` are the other names under which the very same parameter appears (tied weights).
    One that lies ``apart`` has a segment of its own, as its class decides what travels. ``cut_dim``
    is the dimension along which ranks cut it where they hold whole rows. One that has an ``owner``
    is not cut: that one of the ranks that share a unit holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    aliases: tuple[str, ...] = ()
    apart: bool = False
    cut_dim: int = 0
    owner: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements; a scalar has one."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the full parameter in bytes."""
        return self.numel * item_bytes(self.dtype)


@dataclass(frozen=True)
class ModelSpec:
    """All parameters of a model in registration order, each once."""

    params: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for param in self.params:
            for name in (param.name, *param.aliases):
                if name in seen:
                    raise ConfigurationError(
                        f"parameter name {name!r} appears twice; list a tied parameter once, "
                        "with its other names as aliases"
                    )
                seen.add(name)

    def __iter__(self) -> Iterator[ParamSpec]:
        return iter(self.params)

    @property
    def numel(self) -> int:
        """Elements of all parameters together."""
        return sum(param.numel for param in self.params)

    @property
    def bytes(self) -> int:
        """Bytes of all parameters together."""
        return sum(param.bytes for param in self.params)
