# SPDX-License-Identifier: Apache-2.0
"""A run on the torch engine, and its ranks: each computes on its slice of a batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from fullshard.checkpoint import Loaded, RunFolder, Saving
from fullshard.core.trace import Trace
from fullshard.distributed import cleanup, get_device, join
from fullshard.host_memory import host_total_bytes
from fullshard.torch import load_checkpoint, save_checkpoint, save_full_weights, tracing, using
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.texts import broadcast_bytes
from fullshard.torch.inspection import Bytes, recording, resting_bytes
from fullshard.torch.inspection.memory import beside
from fullshard.torch.inspection.run_record import is_out_of_memory
from fullshard.train.data import Batch
from fullshard.train.fits import way_to_fit
from fullshard.train.metrics import writing
from fullshard.train.run import BytesRow, StepOutcome, TrainingRun, World

_TEMPERATURE = 0.7  # of the sample of text


@dataclass
class TorchRun(TrainingRun):
    """A run on one rank; ``unsharded`` is the memory that one process would need."""

    world: "RankWorld"
    model: nn.Module
    optimizer: torch.optim.Optimizer
    unsharded: Bytes
    trace: Trace = field(default_factory=Trace)  # of the observed step

    @property
    def parameters_numel(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    def step_on(self, batch: Batch, rate: float) -> StepOutcome:
        self.optimizer.zero_grad()
        logits, targets = self._forward(batch)
        loss = F.cross_entropy(logits, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        # Without a limit nothing is scaled, but the norm is still worth knowing.
        norm = clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm or math.inf)
        mean_loss, bad = agree(self.world, loss.detach(), norm)
        if bad:
            return StepOutcome(mean_loss, float(norm), f"rank {', '.join(map(str, bad))}")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return StepOutcome(mean_loss, float(norm), "")

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """See `TrainingRun.evaluate`.

        Every rank must call forward equally often: one that has run out of samples repeats one and
        does not count it.
        """
        (rank, size), count = self.world.part, self.data.validation_count
        local = self.config.train.batch // size
        sums = torch.zeros(3, dtype=torch.float64, device=self.world.device)  # loss, right, targets
        self.model.eval()
        for first in range(0, count, local * size):
            mine = range(first + rank * local, count)[:local]
            logits, targets = self._forward(self.data.validation_batch(mine or [0]))
            if mine:
                sums[0] += F.cross_entropy(logits, targets, reduction="sum")
                sums[1] += (logits.argmax(-1) == targets).sum()
                sums[2] += targets.numel()
        self.model.train()
        loss, right, targets_seen = self.world.total(sums).tolist()
        return loss / targets_seen, right / targets_seen

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return logits, float32 (targets, classes), and the targets that belong to them, flat."""
        parts = [torch.as_tensor(part, device=self.world.device) for part in batch]
        dtype = getattr(torch, self.config.train.dtype)
        *inputs, targets = (part.to(dtype) if part.is_floating_point() else part for part in parts)
        # Told beforehand, ranks need not ask each other before every unit.
        runs = {"tower": len(inputs[1]) > 0} if self.config.model.name == "vlm" else {}
        with using(self.model, **runs):
            logits = self.model(*inputs)
        return logits.flatten(0, -2).float(), targets.flatten()

    def load_step(self, folder: RunFolder) -> tuple[Loaded, str]:
        loaded = load_checkpoint(folder, self.model, self.optimizer, fallback=True)
        same_ranks = loaded.world == self.world.size and loaded.restore_random_state()
        return loaded, "" if same_ranks else f", saved by {loaded.world} ranks"

    def save_step(
        self, folder: RunFolder, step: int, extra: dict[str, Any], asynchronous: bool
    ) -> Saving:
        model, optimizer = self.model, self.optimizer
        return save_checkpoint(
            folder, model, optimizer, step=step, extra=extra, asynchronous=asynchronous
        )

    def is_finite(self) -> bool:
        params = list(self.model.parameters())
        states = [self.optimizer.state.get(param, {}).values() for param in params]
        values = [*params, *(value for state in states for value in state)]
        tensors = [getattr(v, "local", v).detach() for v in values if isinstance(v, Tensor)]
        bad = not all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
        return not any(self.world.somewhere(bad))

    def save_weights(self, path: Path) -> None:
        save_full_weights(self.model, path)

    @contextmanager
    def recorded(self, folder: str) -> Iterator[None]:
        if not (self.config.log.record and folder):
            yield
            return
        try:
            with recording(
                folder, self.model, self.optimizer, settings=self.settings_told
            ) as self.record:
                yield
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(way_to_fit(self.config, self.world.size, self._limit_bytes()))
            raise

    def _limit_bytes(self) -> int:
        """Return the memory of this rank: of its device, or its share of a host of ranks."""
        device = self.world.device_memory()
        return device[1] if device else host_total_bytes() // self.world.size

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Trace what the engine does inside."""
        with tracing(self.model) as self.trace:
            yield

    def keep_observed(self, folder: Path | None) -> str:
        """See `TrainingRun.keep_observed`: the trace, if the settings want it."""
        if self.config.log.trace and folder is not None:
            with writing(folder / "trace.jsonl"):
                self.trace.save(folder / "trace.jsonl")
        transient, whole = self.trace.peak_bytes, self.unsharded.parameters_bytes
        if not (transient and whole):
            return ""
        return (
            f"What rests is cut by the number of ranks. The units that a step has whole are not: "
            f"here they take {transient / whole:.0%} of the parameters' memory. The "
            "more blocks a model has, the smaller that part; a small one gains little at its peak."
        )

    def bytes_rows(self) -> list[BytesRow]:
        """See `TrainingRun.bytes_rows`. Gradients of the last step are still there."""
        at_rest = resting_bytes(self.model, self.optimizer)
        at_most = replace(at_rest, transient_bytes=self.trace.peak_bytes)
        return [*beside(at_most, self.unsharded)]

    @torch.no_grad()
    def write_text(self, prompt: bytes, count: int) -> bytes:
        """See `TrainingRun.write_text`.

        All ranks run the same forwards, since each gathers parameters, and draw from the same seed.
        """
        generator = torch.Generator().manual_seed(self.config.train.seed)
        text = list(prompt)
        self.model.eval()
        for _ in range(count):
            seen = torch.tensor([text[-self.config.context :]], device=self.world.device)
            logits = self.model(seen)[0, -1].float().cpu()
            chances = torch.softmax(logits[:256] / _TEMPERATURE, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        self.model.train()
        return bytes(text)


def agree(world: "RankWorld", loss: Tensor, norm: Tensor) -> tuple[float, list[int]]:
    """Return the mean loss over all ranks, and the ranks whose loss or gradient norm is not finite.

    Collective: one small all-reduce, after which every rank knows the same and takes the same turn.
    A norm over all ranks is not finite on every rank; then those with a bad loss are named, if any.
    """
    rank, size = world.part
    values = torch.zeros(2 * size + 1, dtype=torch.float64, device=world.device)
    values[0] = loss
    values[1 + 2 * rank] = not bool(torch.isfinite(loss))
    values[2 + 2 * rank] = not bool(torch.isfinite(norm))
    total, *flags = world.total(values).tolist()
    bad_loss, bad_norm = ([r for r in range(size) if flags[2 * r + k]] for k in (0, 1))
    return total / size, bad_loss or bad_norm


# -- its ranks ------------------------------------------------------------------------------------


class RankWorld(World):
    """A rank of ``comm`` that computes on ``device``."""

    noun = "rank"

    def __init__(self, comm: Comm, device: torch.device):
        self.comm: Comm = comm
        self.device: torch.device = device
        self.part: tuple[int, int] = comm.rank, comm.size
        self.size: int = comm.size
        self.is_first: bool = comm.rank == 0
        self.name: str = f"{comm.size} ranks"
        self.where: str = f"{self.name} on {device.type}"
        cuda = device.type == "cuda"
        self.driver = torch.cuda.get_device_name(device) if cuda else device.type

    def device_memory(self) -> tuple[int, int] | None:
        if self.device.type != "cuda":
            return None
        total = torch.cuda.mem_get_info(self.device)[1]
        return torch.cuda.max_memory_allocated(self.device), total

    def total(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (a small tensor, on `device`) over all ranks, in place. Collective."""
        self.comm.all_reduce([values]).wait()
        return values

    def of_all(self, *values: float) -> list[list[float]]:
        rows = torch.zeros(self.size, len(values), dtype=torch.float64, device=self.device)
        rows[self.part[0]] = torch.tensor(values, dtype=torch.float64, device="cpu")
        return self.total(rows).tolist()

    def somewhere(self, *flags: bool) -> tuple[bool, ...]:
        counts = self.total(torch.tensor(flags, dtype=torch.float64, device=self.device))
        return tuple(count > 0 for count in counts.tolist())

    def shared_text(self, text: str) -> str:
        return broadcast_bytes(self.comm, text.encode(), self.device).decode()


@contextmanager
def joined(*, ask_hosts: bool = False) -> Iterator[RankWorld]:
    """Join the ranks that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, ...), then leave.

    Collective. With GPUs each local rank takes one and NCCL carries the collectives, else Gloo.
    With ``ask_hosts`` Gloo carries what is in host memory there, too: optional units ask in it.
    """
    device = get_device()
    on_gpu = "cpu:gloo,cuda:nccl" if ask_hosts else "nccl"
    join(on_gpu if device.type == "cuda" else "gloo")
    world = dist.group.WORLD
    assert world is not None
    yield RankWorld(ProcessGroupComm(world), device)
    # Not after an error: leaving would fail the other ranks before this one has said why.
    cleanup()
