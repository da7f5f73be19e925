# SPDX-License-Identifier: Apache-2.0
"""A JSON file that knows when it was damaged.

Three lines: the format's name, its version and the checksum of the second line; that line, all of
the content; and a closing brace. Together they are one JSON object. Every bit of the file is either
covered by the checksum or compared with the only form in which it is written.
"""

import json
import re
from pathlib import Path
from typing import Any

import xxhash

from fullshard.core.errors import CheckpointError

_HEAD = re.compile(
    rb'\{"format":"([a-z-]{1,40})","version":(\d{1,6}),"xxh3_128":"([0-9a-f]{32})","manifest":\n'
)
_TAIL = b"\n}\n"


def checksum_of(data: Any) -> str:
    """The XXH3-128 of bytes, 32 lower-case hexadecimal digits, most significant first."""
    return xxhash.xxh3_128_hexdigest(data)


def wrap(name: str, version: int, content: Any) -> bytes:
    """The bytes of a file with ``content``, which is JSON."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return _head(name, version, checksum_of(body)) + body + _TAIL


def unwrap(data: bytes, name: str, version: int, path: Path) -> Any:
    """The content of a file of that format and version. Raises `CheckpointError`."""
    head = _HEAD.match(data)
    if head is None or not data.endswith(_TAIL):
        raise _refusal(path, f"it is no {name}, or it is damaged")
    found, number, checksum = head[1].decode(), int(head[2]), head[3].decode()
    if _head(found, number, checksum) != head[0]:
        raise _refusal(path, "it is damaged: its first line has a form that is never written")
    if found != name:
        raise _refusal(path, f"it says {found!r}, expected {name!r}")
    if number != version:
        raise _refusal(
            path,
            f"it has version {number} of the format and this fullshard reads {version}: "
            f"use {'a newer' if number > version else 'an older'} fullshard (or the file is "
            "damaged)",
        )
    body = memoryview(data)[head.end() : len(data) - len(_TAIL)]
    if checksum_of(body) != checksum:
        raise _refusal(path, "its checksum does not match: it is damaged")
    try:
        return json.loads(bytes(body), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"it cannot be: {error or type(error).__name__}") from error


def _head(name: str, version: int, checksum: str) -> bytes:
    text = f'{{"format":"{name}","version":{version},"xxh3_128":"{checksum}","manifest":\n'
    return text.encode()


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _refusal(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"cannot read {path}: {why}", file=str(path))
