# SPDX-License-Identifier: Apache-2.0
"""Stored numbers by safetensors' names of dtypes, and conversions that lose nothing but digits."""

from typing import Any

import numpy
from numpy.typing import NDArray

from fullshard.core.errors import CheckpointError
from fullshard.core.safetensors_format import DTYPE_BYTES

# The largest number that is finite.
_LARGEST = {
    "F8_E4M3": 448.0,
    "F8_E5M2": 57344.0,
    "F16": 65504.0,
    "BF16": 3.3895313892515355e38,
    "F32": 3.4028234663852886e38,
    "F64": 1.7976931348623157e308,
}
_RANGES: dict[str, tuple[float, float]] = {
    **{f"U{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    **{f"I{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{name: (-largest, largest) for name, largest in _LARGEST.items()},
    "BOOL": (0, 1),
}


def numpy_dtype(name: str) -> str | None:
    """Return NumPy's name of a dtype, None if it has none: of bfloat16 and the 8-bit floats."""
    if name == "BOOL" or name in ("BF16", "F8_E4M3", "F8_E5M2"):
        return "?" if name == "BOOL" else None
    return f"<{name[0].lower()}{DTYPE_BYTES[name]}"


def _kind(dtype: str) -> str:
    return "truth" if dtype == "BOOL" else "fractions" if dtype in _LARGEST else "whole numbers"


def change_of_kind(name: str, stored: str, wanted: str, strict: bool) -> str:
    """Tell how the kind of numbers changes, if so; with ``strict`` raise `CheckpointError`."""
    there, here = _kind(stored), _kind(wanted)
    if there == here:
        return ""
    if strict:
        raise CheckpointError(
            f"{name!r} is {stored} in it and {wanted} here, and {there} to {here} are not "
            "converted unless strict=False",
            tensor=name,
        )
    return f"{name}: {stored} to {wanted}"


def is_narrower(stored: str, wanted: str) -> bool:
    """True if some number of the dtype ``stored`` is out of the range of ``wanted``."""
    (low, high), (least, most) = _RANGES[stored], _RANGES[wanted]
    return low < least or high > most


def refuse_lost_numbers(name: str, stored: str, wanted: str, values: NDArray[Any]) -> None:
    """Raise `CheckpointError` if finite ``values`` (whole, or float64) do not fit ``wanted``."""
    least, most = _RANGES[wanted]
    count = numpy.count_nonzero(numpy.isfinite(values) & ((values < least) | (values > most)))
    if count:
        raise CheckpointError(
            f"{count} numbers of {name!r} are {stored} in it and out of the range of {wanted}, as "
            "wanted here; load into a wider dtype, or pass strict=False to let them overflow",
            tensor=name,
        )
