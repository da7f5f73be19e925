# SPDX-License-Identifier: Apache-2.0
"""Traces: one record for each op, planned or measured, with its time and the memory held."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fullshard.core.errors import ConfigurationError
from fullshard.core.text import write_whole


@dataclass(frozen=True)
class TraceRecord:
    """One op on one unit.

    ``at_s`` is when the op was done, counted from the begin of the trace (``gather`` and ``reduce``
    only start a collective: its wait is an op of its own). ``bytes`` is the size of the buffer the
    op is about, ``live_bytes`` what all units hold beyond their shards right after it: full
    parameters, full gradients, scratch of reduces.
    """

    op: str
    unit: str
    at_s: float
    bytes: int
    live_bytes: int


@dataclass
class Trace:
    """The records of one or more steps, in order."""

    records: list[TraceRecord] = field(default_factory=list)

    def __iter__(self) -> Iterator[TraceRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that units held beyond their shards at one moment."""
        return max((record.live_bytes for record in self.records), default=0)

    def count(self, op: str) -> int:
        """Count the ops of one kind."""
        return sum(record.op == op for record in self.records)

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON lines, one record a line."""
        lines = [json.dumps(asdict(record)) for record in self.records]
        write_whole(path, "".join(line + "\n" for line in lines))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `save` wrote; a line that is no record raises `ConfigurationError`."""
        records = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            try:
                fields: Mapping[str, object] = json.loads(line)
                records.append(TraceRecord(**fields))  # type: ignore[arg-type]
            except (TypeError, json.JSONDecodeError) as error:
                raise ConfigurationError(f"{path}:{number} is no trace record: {error}") from error
        return cls(records)
