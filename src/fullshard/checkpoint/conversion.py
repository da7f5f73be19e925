# SPDX-License-Identifier: Apache-2.0
"""Which conversions of stored numbers lose nothing but digits, by safetensors' names of dtypes."""

from fullshard.core.errors import CheckpointError

__all__ = ["is_narrower", "lost_numbers", "other_kind"]

# The largest number that is finite; of whole numbers also the smallest.
_LARGEST = {
    "F8_E4M3": 448.0,
    "F8_E5M2": 57344.0,
    "F16": 65504.0,
    "BF16": 3.3895313892515355e38,
    "F32": 3.4028234663852886e38,
    "F64": 1.7976931348623157e308,
}
_RANGES = {
    f"{sign}{bits}": (0, 2**bits - 1) if sign == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in "UI"
    for bits in (8, 16, 32, 64)
}


def _kind(dtype: str) -> str:
    return "truth" if dtype == "BOOL" else "fractions" if dtype in _LARGEST else "whole numbers"


def other_kind(stored: str, wanted: str) -> str:
    """Tell in what kind two dtypes differ ("whole numbers to fractions"); empty if in none."""
    there, here = _kind(stored), _kind(wanted)
    return "" if there == here else f"{there} to {here}"


def is_narrower(stored: str, wanted: str) -> bool:
    """True if some number of the dtype ``stored`` is out of the range of ``wanted``."""
    if stored in _LARGEST and wanted in _LARGEST:
        return _LARGEST[stored] > _LARGEST[wanted]
    if stored in _RANGES and wanted in _RANGES:
        (low, high), (least, most) = _RANGES[stored], _RANGES[wanted]
        return low < least or high > most
    return False


def lost_numbers(name: str, stored: str, wanted: str, count: int) -> CheckpointError:
    """The refusal of ``count`` numbers that would become infinite, or others."""
    return CheckpointError(
        f"{count} numbers of {name!r} are {stored} in it and out of the range of {wanted}, as "
        "wanted here; load into a wider dtype, or pass strict=False to let them overflow",
        tensor=name,
    )
