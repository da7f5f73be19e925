# SPDX-License-Identifier: Apache-2.0
"""Plain Python values as standard JSON, and back to equal values of the same types.

JSON has no tuples, bytes, complex keys, infinities or NaN. Those become an object with one key that
begins with ``$``:

    (1, 2)              {"$tuple": [1, 2]}
    b"ab"               {"$bytes": "YWI="}
    inf, -inf, nan      {"$float": "inf"}
    {0: "a"}            {"$items": [[0, "a"]]}     also a dict with a key that begins with "$"

Nothing that is read back can run code.
"""

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from fullshard.core.errors import ConfigurationError

Other = Callable[[Any], Any]
_MOST_BITS = 2**13  # of a whole number: Python reads no longer ones from a text


def to_json(value: Any, other: Other | None = None, where: str = "value") -> Any:
    """``value`` as something that `json.dumps` writes with ``allow_nan=False``.

    ``other`` turns a value of another type into one that is known here, or returns it unchanged.
    Raises `ConfigurationError` for a type that is not known, naming the place below ``where``.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) is int and value.bit_length() <= _MOST_BITS:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {"$tuple": [to_json(x, other, f"{where}[{i}]") for i, x in enumerate(value)]}
    if isinstance(value, list):
        return [to_json(each, other, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, Mapping):
        items = {key: to_json(each, other, f"{where}[{key!r}]") for key, each in value.items()}
        if all(type(key) is str and not key.startswith("$") for key in items):
            return items
        return {"$items": [[to_json(key, other, where), each] for key, each in items.items()]}
    turned = other(value) if other is not None else value
    if turned is not value:
        return to_json(turned, other, where)
    raise ConfigurationError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept "
        "as JSON; give numbers, texts, bytes, lists, tuples and dicts of them, such as the "
        "state_dict() of what it belongs to"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` was given. Raises `ConfigurationError` for what it cannot have made.

    Numbers of another type than int and float come back as what ``other`` made of them.
    """
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: from_json(each) for key, each in value.items()}
    try:
        if len(value) == 1:
            return _tagged(tags[0], value[tags[0]])
    except (TypeError, ValueError, binascii.Error) as error:
        raise ConfigurationError(f"{_short(value)} cannot be read: {error}") from error
    raise ConfigurationError(f"{_short(value)} cannot be read: no single known tag")


def _tagged(tag: str, inner: Any) -> Any:
    if tag == "$tuple" and isinstance(inner, list):
        return tuple(from_json(each) for each in inner)
    if tag == "$bytes" and isinstance(inner, str):
        return base64.b64decode(inner, validate=True)
    if tag == "$float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    if tag == "$items" and isinstance(inner, list):
        return {from_json(key): from_json(each) for key, each in inner}
    raise ValueError("unknown tag")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."
