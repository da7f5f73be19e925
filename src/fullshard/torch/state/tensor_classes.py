# SPDX-License-Identifier: Apache-2.0
"""Tensor classes taken apart: plain tensors within, and a description that JSON can hold.

[Note: Classes that are made from descriptions]
A value such as torchao's state in 8 bits is made of plain tensors (codes, scales) that its class
names in ``__tensor_flatten__``. Other ranks and files are given these, and the name of the class.
It is looked up among those that `torch.serialization.add_safe_globals` was called with, as
`torch.load` does it: a name makes nothing be imported, and nothing is unpickled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError
from fullshard.torch.unit.buffers import dtype_name, dtype_of

_DTYPE, _TUPLE = "torch.dtype", "tuple"


def taken_apart(value: Any) -> tuple[dict[str, Any] | None, dict[str, Tensor]] | None:
    """Return a description of ``value``, for `put_together`, and its plain tensors by name.

    A plain tensor is its own only part and needs no description. None for what is no tensor, and
    for a class that `put_together` could not make.
    """
    if type(value) is Tensor:
        return None, {"": value}
    name = _name(type(value))
    if not isinstance(value, Tensor) or name not in _known():
        return None
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {part: getattr(value, part) for part in names}
    sizes = {"size": list(value.shape), "stride": list(value.stride())}
    try:
        described = {"class": name, "parts": list(names), "context": _encoded(context), **sizes}
    except TypeError:
        return None
    return (described, parts) if all(type(part) is Tensor for part in parts.values()) else None


def names_of_parts(value: Any) -> list[str]:
    """Return the names of the parts that a description tells; none if ``value`` is no such."""
    keys = {"class", "parts", "context", "size", "stride"}
    return list(value["parts"]) if isinstance(value, Mapping) and set(value) == keys else []


def put_together(described: Mapping[str, Any] | None, parts: Sequence[Tensor]) -> Tensor:
    """Invert `taken_apart`, without copies. Raises `ConfigurationError` for unknown classes."""
    if described is None:
        return parts[0]
    kind = _known().get(described["class"])
    if kind is None:
        raise ConfigurationError(
            f"a tensor is a {described['class']!r}, which is not known here; import its library, "
            "and call torch.serialization.add_safe_globals([...]) with the class if that does not"
        )
    made: Tensor = kind.__tensor_unflatten__(
        dict(zip(described["parts"], parts, strict=True)),
        _decoded(described["context"]),
        torch.Size(described["size"]),
        tuple(described["stride"]),
    )
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known() -> dict[str, Any]:
    return {
        _name(kind): kind
        for kind in torch.serialization.get_safe_globals()
        if isinstance(kind, type)
        and issubclass(kind, Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    }


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {_DTYPE: dtype_name(value)}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encoded(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"JSON holds no {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_DTYPE}:
        return dtype_of(value[_DTYPE])
    if set(value) == {_TUPLE}:
        return tuple(_decoded(item) for item in value[_TUPLE])
    return {key: _decoded(item) for key, item in value.items()}
