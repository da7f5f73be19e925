# SPDX-License-Identifier: Apache-2.0
import pytest

from fullshard.core.text import bytes_text, in_columns


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (-2048, "-2.00 KiB"),
        (3 * 2**20, "3.00 MiB"),
        (5 * 2**40, "5.00 TiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_bytes_in_words(count, text):
    assert bytes_text(count) == text


def test_columns():
    rows = [("name", "bytes"), ("a", 1234567), ("longer", "-")]
    assert in_columns(rows, right=(1,)).splitlines() == [
        "name        bytes",
        "------  ---------",
        "a       1,234,567",
        "longer          -",
    ]
