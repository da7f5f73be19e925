# SPDX-License-Identifier: Apache-2.0
"""Records as files: ``RUN_DIR/trace/rank-00003.jsonl``, written while a run goes on.

Each line is a JSON object with one key, which says what it is: ``attempt`` (first, and again after
a restart), ``step``, ``span`` or ``end``. Named tuples are lists, ops lists of columns. Nothing of
a file is believed before it was looked at: lines that are no record are counted and left out.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from fullshard.core.errors import ConfigurationError
from fullshard.report.record import (
    Attempt,
    Facts,
    MemoryByOwner,
    RankRecord,
    RecordedStep,
    RecordedUnit,
    RunRecord,
    TimedOps,
    TimedSpan,
)

VERSION = 1
_LIMIT_BYTES = 32 * 2**20
_LINE_BYTES = 64 * 2**20  # no line is longer; what is was not written here
_TEXT_CHARACTERS = 2**16
_END_BYTES = 1024  # kept free for the last line
_NAME = re.compile(r"rank-(\d{5,9})\.jsonl")
_COLUMNS = ("op", "unit", "begin_s", "end_s", "bytes", "live_bytes", "waiter")
_MOST = 2.0**62


def record_path(folder: str | Path, rank: int) -> Path:
    """Return where a run that writes to ``folder`` keeps the record of ``rank``."""
    return Path(folder) / "trace" / f"rank-{rank:05d}.jsonl"


class RecordWriter:
    """Appends one attempt to a rank's record; the file never grows beyond ``limit_bytes``.

    Lines are complete in the file when a call returns. When half of the limit is used up steps are
    written without their ops; when all is, they are counted only. Raises `OSError` if the file
    cannot be written.
    """

    def __init__(self, folder: str | Path, facts: Facts, limit_bytes: int = _LIMIT_BYTES):
        self.rank: int = facts.rank
        self.path: Path = record_path(folder, facts.rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._limit = limit_bytes - _END_BYTES
        self._size = self.path.stat().st_size if self.path.exists() else 0
        self._left_out = 0
        if self._size and _ends_torn(self.path):
            self._write("\n", anyway=True)
        about = {name: _as_json(value) for name, value in asdict(facts).items()}
        self._line("attempt", {"version": VERSION, **about}, anyway=True)

    @property
    def detailed(self) -> bool:
        """True as long as there is room for the ops of steps."""
        return self._size < self._limit / 2

    def step(self, step: RecordedStep) -> None:
        """Write a step."""
        if step.ops is not None and not self.detailed:
            step = replace(step, ops=None, memory=step.memory[-1:])
        told = {name: value for name, value in vars(step).items() if value not in (None, (), {})}
        ops = told.pop("ops", None)
        fields = _rounded(told)
        if step.loss is not None and math.isfinite(step.loss):
            fields["loss"] = step.loss  # to the last bit
        if ops is not None:
            columns = [getattr(ops, name) for name in _COLUMNS]
            columns[2:4] = [list(map(round, column, repeat(7))) for column in columns[2:4]]
            fields["ops"] = columns
        self._left_out += not self._line("step", fields)

    def span(self, span: TimedSpan) -> None:
        """Write a span that lies outside of steps."""
        self._line("span", _rounded(span))

    def leave(self, what: str, text: str) -> None:
        """Append a text for people to ``waits-rank-00003.txt``; ``what`` is "waits" or "memory"."""
        path = self.path.with_name(f"{what}-{self.path.stem}.txt")
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text[:_TEXT_CHARACTERS] + "\n\n")

    def end(self, ended_s: float, ending: str = "finished") -> None:
        """Write the last line."""
        fields = {"at_s": round(ended_s, 7), "ending": ending[:100], "left_out": self._left_out}
        self._line("end", fields, anyway=True)

    def _line(self, kind: str, fields: Any, *, anyway: bool = False) -> bool:
        text = json.dumps({kind: fields}, separators=(",", ":"), allow_nan=False)
        return self._write(text + "\n", anyway=anyway)

    def _write(self, text: str, *, anyway: bool) -> bool:
        if self._size + len(text) > self._limit and not anyway:  # the text is ASCII
            return False
        self._size += len(text)
        with self.path.open("a", encoding="ascii", newline="\n") as file:
            file.write(text)
        return True


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _rounded(value: Any) -> Any:
    """Return ``value`` with times of a tenth of a microsecond."""
    return _as_json(value, 7)


def _as_json(value: Any, digits: int | None = None) -> Any:
    """Return ``value`` with None for what is no number, and others rounded to ``digits``."""
    if isinstance(value, float):
        number = value if digits is None else round(value, digits)
        return number if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _as_json(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each, digits) for each in value]
    return value


def age_of_process_s() -> float:
    """Return the seconds since this process was started, where the system says it."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0
    return max(0.0, age_s)


# ---- reading ------------------------------------------------------------------------------------


def read_run(folder: str | Path) -> RunRecord:
    """Read the records in ``folder``, as far as it goes. Raises `ConfigurationError` for none."""
    ranks: dict[int, RankRecord] = {}
    unread: list[ConfigurationError] = []
    for path in sorted((Path(folder) / "trace").glob("rank-*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            try:
                record = read_rank(path)
                if record.rank != int(match[1]):
                    raise ConfigurationError(f"{path}: this is the record of rank {record.rank}")
                ranks[record.rank] = record
            except ConfigurationError as error:
                unread.append(error)
    if not ranks and unread:
        raise unread[0]
    if not ranks:
        raise ConfigurationError(
            f"{str(folder)!r} holds no record: expected trace/rank-00000.jsonl in it, as "
            "fullshard train and fullshard.report.recording write it"
        )
    return RunRecord(ranks, tuple(map(str, unread)))


def read_rank(path: str | Path) -> RankRecord:
    """Read one rank's record. Raises `ConfigurationError` if nothing in it is right."""
    parts: list[_Part] = []
    damaged = 0
    for line in _lines(Path(path)):
        try:
            ((kind, fields),) = _object(json.loads(line)).items()
            if kind == "attempt":
                version = _whole(fields.pop("version"))
                if version > VERSION:
                    raise ConfigurationError(
                        f"{path} was written by a newer fullshard (version {version} of the "
                        f"record, {VERSION} is the latest known here); install that one"
                    )
                parts.append(_Part(_facts(fields)))
            else:
                parts[-1].take(kind, fields)
        except ConfigurationError:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            damaged += 1
    ranks = {part.facts.rank for part in parts}
    if len(ranks) != 1:
        what = f"has records of ranks {sorted(ranks)}" if ranks else "holds no record of a rank"
        raise ConfigurationError(f"{path} {what}; {damaged} lines cannot be read")
    return RankRecord(ranks.pop(), tuple(part.attempt() for part in parts), damaged)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES):
                if line.strip():
                    yield line
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error


class _Part:
    """An attempt while its lines are read."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self._steps: list[RecordedStep] = []
        self._spans: list[TimedSpan] = []
        self._end: dict[str, Any] = {}

    def take(self, kind: str, fields: Any) -> None:
        if kind == "step":
            self._steps.append(_step(_object(fields), len(self.facts.units)))
        elif kind == "span":
            self._spans.append(_span(fields))
        elif kind == "end":
            ended_s, left_out = _time(fields["at_s"]), _whole(fields["left_out"])
            ending = _text(fields["ending"])
            self._end = {"ended_s": ended_s, "ending": ending, "left_out": left_out}
        else:
            raise ValueError(kind)

    def attempt(self) -> Attempt:
        return Attempt(self.facts, tuple(self._steps), tuple(self._spans), **self._end)


def _facts(fields: Mapping[str, Any]) -> Facts:
    rank, world = _whole(fields["rank"]), _whole(fields["world"])
    units = tuple(
        RecordedUnit(_text(name), *map(_whole, sizes)) for name, *sizes in fields["units"]
    )
    settings = {_text(name): _setting(value) for name, value in _object(fields["settings"]).items()}
    told = {key: value for key, value in _object(fields["forecast"]).items() if value is not None}
    forecast = {_text(key): _number(value) for key, value in told.items()}
    if not rank < world:
        raise ValueError(rank)
    return Facts(
        rank,
        world,
        _text(fields["host"]),
        _number(fields["started_at"]),
        _number(fields["clock_offset_s"]),
        _text(fields["engine"]),
        _text(fields["device"]),
        units,
        settings,
        forecast,
        tuple(map(_text, fields["missing"])),
    )


def _step(fields: Mapping[str, Any], units: int) -> RecordedStep:
    sums = _object(fields.get("sums_s", {}))
    step = RecordedStep(
        _whole(fields["step"]),
        _time(fields["begin_s"]),
        _time(fields["end_s"]),
        _or_none(_whole, fields.get("tokens")),
        _or_none(_number, fields.get("loss")),
        {_text(name): _time(value) for name, value in sums.items()},
        tuple(_span(span) for span in fields.get("spans", ())),
        tuple(_memory(memory) for memory in fields.get("memory", ())),
        _ops(fields["ops"], units) if "ops" in fields else None,
    )
    _in_order([step.begin_s], [step.end_s])
    return step


def _ops(columns: Any, units: int) -> TimedOps:
    op, unit, begin, end, size, live, waiter = columns
    if len({len(column) for column in columns}) > 1:
        raise ValueError("columns of unequal lengths")
    for name in set(op):
        _text(name)
    for times in (begin, end):
        _all(times, (int, float), math.inf)
    _all(unit, (int,), units)
    _all([each for each in waiter if each is not None], (int,), units)
    for sizes in (size, live):
        _all(sizes, (int,), _MOST)
    _in_order(begin, end)
    return TimedOps(op, unit, begin, end, size, live, waiter)


def _all(values: Sequence[Any], types: tuple[type, ...], below: float) -> None:
    """Raise unless all ``values`` are numbers from 0 to ``below``, quickly: there are many."""
    if values and not (
        set(map(type, values)) <= set(types) and min(values) >= 0 and max(values) < below
    ):
        raise ValueError("a column holds something else than its numbers")


def _in_order(begin: Sequence[float], end: Sequence[float]) -> None:
    if any(first > last for first, last in zip(begin, end, strict=True)):
        raise ValueError("ends before it begins")


def _span(fields: Any) -> TimedSpan:
    what, begin, end = fields
    span = TimedSpan(_text(what), _time(begin), _time(end))
    _in_order([span.begin_s], [span.end_s])
    return span


def _memory(fields: Any) -> MemoryByOwner:
    at_s, *owners = fields
    known, rest = owners[:5], owners[5:]
    sizes = chain(map(_whole, known), (_or_none(_whole, size) for size in rest))
    return MemoryByOwner(_time(at_s), *sizes)


def _or_none(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(value)
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < _MOST:
        raise ValueError(value)
    return float(value)


def _time(value: Any) -> float:
    if _number(value) < 0:
        raise ValueError(value)
    return float(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value


def _setting(value: Any) -> str | float | bool | None:
    if value is None or isinstance(value, str | bool):
        return value
    return value if type(value) is int else _number(value)
