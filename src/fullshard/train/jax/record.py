# SPDX-License-Identifier: Apache-2.0
"""The record of a run on JAX: its steps and what lies between them, by the host's clock."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullshard.report import Facts, RecordedStep, RecordWriter, TimedSpan
from fullshard.report.files import age_of_process_s
from fullshard.train.metrics import writing
from fullshard.train.run import NoRecord, World

_MISSING = "units: XLA orders what they do inside of one compiled step (jax.profiler shows it)"


class StepsRecord(NoRecord):
    """Writes a process's record; a step ends when its loss is noted, which JAX has waited for."""

    def __init__(self, folder: str, world: World, settings: dict[str, str | float | bool | None]):
        age_s = age_of_process_s()
        self._zero = time.perf_counter() - age_s
        rank, size = world.part
        self._writer = RecordWriter(
            folder,
            Facts(
                rank,
                size,
                socket.gethostname(),
                time.time() - age_s,
                engine="jax",
                device=world.where,
                settings=settings,
                missing=(_MISSING,),
            ),
        )
        self._step, self._compiled = 0, False
        self._spans: list[TimedSpan] = []
        self._begin = self._now_s()
        self._writer.span(TimedSpan("start", 0.0, self._begin))

    @property
    def path(self) -> Path:
        """The file that is written."""
        return self._writer.path

    def goes_on_from(self, step: int) -> None:
        self._step = step

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Note the time within; only "data" is part of a step."""
        begin = self._now_s()
        try:
            yield
        finally:
            span = TimedSpan(what, begin, self._now_s())
            if what == "data":
                self._spans.append(span)
            else:
                with writing(self.path):
                    self._writer.span(span)
                self._begin = self._now_s()

    def note(self, *, loss: float, tokens: int) -> None:
        """End the present step. The first one has compiled all others."""
        end = self._now_s()
        begin = self._spans[-1].end_s if self._spans else self._begin
        self._spans.append(TimedSpan("step" if self._compiled else "compile", begin, end))
        self._compiled = True
        sums = {span.what: span.end_s - span.begin_s for span in self._spans}
        step = RecordedStep(self._step, self._begin, end, tokens, loss, sums, tuple(self._spans))
        with writing(self.path):
            self._writer.step(step)
        self._step, self._begin, self._spans = self._step + 1, self._now_s(), []

    def close(self, ending: str) -> None:
        """Write the last line."""
        with writing(self.path):
            self._writer.end(self._now_s(), ending)

    def _now_s(self) -> float:
        return time.perf_counter() - self._zero
