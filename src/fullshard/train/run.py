# SPDX-License-Identifier: Apache-2.0
"""The two nouns of a run that its loop works with, whichever engine computes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.checkpoint import Loaded, RunFolder, Saving
from fullshard.host_memory import host_total_bytes, resident_bytes
from fullshard.plan.cluster.devices import device_of_driver
from fullshard.train.config import Config
from fullshard.train.data import Batch, Dataset

BytesRow = tuple[str, int, int | None]  # purpose, bytes of a rank, of one unsharded process


class World(ABC):
    """The ranks of a run (torch) or its devices (JAX), as one of its processes sees them.

    ``size`` counts them, ``noun`` calls one of them, ``name`` all of them, and ``where`` says on
    what they compute. ``part`` is which slice of a batch this process takes, and of how many.
    ``is_first`` is true in the process that prints and writes.
    """

    noun: str
    size: int
    part: tuple[int, int]
    is_first: bool
    name: str
    where: str
    driver: str  # the device as its driver calls it

    @abstractmethod
    def device_memory(self) -> tuple[int, int] | None:
        """Return the most bytes used of the device, and all of it; None if it uses the host's."""

    @abstractmethod
    def somewhere(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each of ``flags`` if it is true in any process. Collective."""

    @abstractmethod
    def shared_text(self, text: str) -> str:
        """Return the first process's ``text``. Collective."""

    def peak_flops(self, dtype: str) -> float | None:
        """FLOP/s that one device reaches at most; known for bf16 on some GPUs."""
        device = device_of_driver(self.driver) if dtype == "bfloat16" else None
        return device.peak("bfloat16") if device else None

    def of_all(self, *values: float) -> list[list[float]]:
        """Return the ``values`` of all ranks, in order; of one process its own. Collective."""
        return [list(values)]

    def memory_used(self) -> dict[str, int]:
        """Return the most bytes used so far and how many there are: of a device, or the host."""
        used, total = self.device_memory() or (resident_bytes()[1], host_total_bytes())
        return {"memory_bytes": used, "memory_total_bytes": total}


class StepOutcome(NamedTuple):
    """The loss over the whole batch, the norm of its gradients before clipping, and who has a loss
    or gradient that is not finite, as in "rank 0, 3": then the optimizer has used nothing.
    """

    loss: float
    grad_norm: float
    bad: str


class NoRecord:
    """Stands for the record of a run that keeps none; see `fullshard.torch.RunRecording`."""

    def goes_on_from(self, step: int) -> None:
        """Do nothing."""

    def note(self, *, loss: float, tokens: int) -> None:
        """Do nothing."""

    def take_recent(self) -> tuple[float, float]:
        """Return 0 seconds of steps, and 0 of waits."""
        return 0.0, 0.0

    def span(self, what: str) -> AbstractContextManager[None]:
        """Do nothing within."""
        return nullcontext()

    def end_step(self) -> None:
        """Do nothing."""


@dataclass
class TrainingRun(ABC):
    """A sharded model in training, on one engine. All methods are collective.

    ``record`` is told of what the engine does not see; see `recorded`.
    """

    config: Config
    world: World
    data: Dataset
    record: Any = field(default_factory=NoRecord, kw_only=True)

    @property
    @abstractmethod
    def parameters_numel(self) -> int:
        """The number of all ranks' parameters together."""

    @abstractmethod
    def step_on(self, batch: Batch, rate: float) -> StepOutcome:
        """Do one optimizer step on this process's part of a batch, at the learning rate ``rate``.

        On JAX the rate is part of the compiled step.
        """

    @abstractmethod
    def evaluate(self) -> tuple[float, float]:
        """Return mean loss per target and accuracy over the held-back samples."""

    @abstractmethod
    def load_step(self, folder: RunFolder) -> tuple[Loaded, str]:
        """Load the newest step that is right; return it, and a note on who saved it, or ""."""

    @abstractmethod
    def save_step(
        self, folder: RunFolder, step: int, extra: dict[str, Any], asynchronous: bool
    ) -> Saving:
        """Save a step from which either engine can go on."""

    def ranks_now(self) -> dict[str, float]:
        """Return what all ranks together say of the steps since the last call. Collective.

        The least and most memory that a rank has used; the share of time in which the mean rank
        was held up, and the rank for which others waited, if that is known.
        """
        used = self.world.memory_used()["memory_bytes"]
        memory, steps, waits = zip(
            *self.world.of_all(used, *self.record.take_recent()), strict=True
        )
        told = {"memory_least_bytes": min(memory), "memory_most_bytes": max(memory)}
        if min(steps) > 0:
            shares = [wait / step for wait, step in zip(waits, steps, strict=True)]
            told["exposed_share"] = sum(shares) / len(shares)
            told["slowest_rank"] = shares.index(min(shares))
            told["ahead_of_slowest_share"] = told["exposed_share"] - min(shares)
        return told

    @abstractmethod
    def is_finite(self) -> bool:
        """Return true if all parameters and optimizer states are finite."""

    @abstractmethod
    def save_weights(self, path: Path) -> None:
        """Write all parameters under the names of the torch model, for either engine to read."""

    @abstractmethod
    def bytes_rows(self) -> Sequence[BytesRow]:
        """Return the rows of the table that the run ends with; None stands for what is unknown."""

    @abstractmethod
    def write_text(self, prompt: bytes, count: int) -> bytes:
        """Return ``prompt`` and ``count`` bytes that the model draws after it."""

    @property
    def settings_told(self) -> dict[str, str | float | bool | None]:
        """The settings that a record has beside what the engine knows."""
        config = self.config
        return {
            "name": config.run_name,
            "strategy": config.shard.strategy,
            "batch": config.train.batch,
            "dtype": config.train.dtype,
        }

    def recorded(self, folder: str) -> AbstractContextManager[object]:
        """Return what surrounds a run of which ``folder``, the first process's, gets a record."""
        return nullcontext()

    def observed(self) -> AbstractContextManager[object]:
        """Return what surrounds the one step of a run that its end tells about."""
        return nullcontext()

    def keep_observed(self, folder: Path | None) -> str:
        """Keep in ``folder``, if this process has it, what was observed; return what to say."""
        return ""
