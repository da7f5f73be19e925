# SPDX-License-Identifier: Apache-2.0
"""A callback with which Hugging Face's Trainer records its runs. It imports nothing of theirs."""

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from fullshard.torch.inspection.run_record import RunRecording, recording


class RecordingCallback:
    """``Trainer(..., callbacks=[RecordingCallback("runs/a")])`` records the run in that folder.

    ``options`` are those of `recording`. Evaluations and saves are noted; losses are those that the
    Trainer logs. A run that fails leaves a record without an end.
    """

    def __init__(self, folder: str | Path, **options: Any):
        self.run: RunRecording | None = None
        self._folder, self._options = folder, options
        self._recording = ExitStack()
        self._span = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        """Begin to record. Collective."""
        record = recording(self._folder, model, optimizer, **self._options)
        self.run = self._recording.enter_context(record)
        self.run.goes_on_from(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note what comes next; the Trainer has decided it by now."""
        if control.should_evaluate:
            self._next("evaluation")
        elif control.should_save:
            self._next("checkpoint")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the evaluation."""
        self._next("checkpoint" if control.should_save else None)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the save."""
        self._next(None)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Note the loss."""
        if self.run is not None and logs is not None and "loss" in logs:
            self.run.note(loss=float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the record."""
        self._next(None)
        self._recording.close()
        self.run = None

    def _next(self, what: str | None) -> None:
        self._span.close()
        if what is not None and self.run is not None:
            span: AbstractContextManager[None] = self.run.span(what)
            self._span.enter_context(span)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # an event of the Trainer's that the record does not need
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
