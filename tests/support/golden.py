# SPDX-License-Identifier: Apache-2.0
"""Texts that commands print, kept in files. ``FULLSHARD_GOLDEN=write`` writes them anew."""

import os


def check_golden(path, out, width):
    """``out`` fits ``width`` columns, nothing of it is cut, and it is the text in ``path``."""
    lines = [line.rstrip() for line in out.splitlines()]
    assert [line for line in lines if len(line) > width] == []
    assert "…" not in out
    assert "\x1b" not in out
    if os.environ.get("FULLSHARD_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert lines == path.read_text(encoding="utf-8").splitlines()
