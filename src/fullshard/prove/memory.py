# SPDX-License-Identifier: Apache-2.0
"""Bytes that a rank holds at rest and at the peaks of a step, beside FSDP2, by torch's own record.

A fake process group stands for the other ranks: its collectives exchange nothing. Every byte that
the CPU allocator gave or took back is counted, as the profiler recorded it.
"""

import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.core.presets import Transformer
from fullshard.prove.claims import Claim, Section
from fullshard.prove.processes import ask_python
from fullshard.torch import fully_shard, set_prefetch
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.protocol import Comm, Work, WrappedComm
from fullshard.train.torch.models import Block, Rotary

FORWARD, BACKWARD, OVER = "the step's forward", "the step's backward", "the step is over"
_WARM_UP_STEPS = 2
_MORE = 1.01  # parameters are padded to equal slices, FSDP2's too

_HOW = (
    "One rank of {scene.ranks}; the others are a fake process group. {scene.blocks} blocks of "
    "width {scene.width}, each a unit of {unit_mb:.1f} MB, one token, AdamW in float32, one unit "
    "prefetched in both engines. At rest: parameters, gradients and optimizer state. Transient: "
    "the peak of forward or backward beyond that, in units. fullshard is measured twice: with "
    "collectives that are complete at once, and with ones that complete only when waited for. "
    "What FSDP2 holds does not depend on that."
)


@dataclass(frozen=True)
class Scene:
    """The model whose memory is counted, and the number of ranks that share it."""

    ranks: int
    blocks: int
    width: int

    @property
    def shape(self) -> Transformer:
        """The shape of the model's blocks."""
        return Transformer(self.blocks, self.width, 8, 8, 4 * self.width, 256, context=16)


@dataclass(frozen=True)
class CountedBytes:
    """Bytes of one rank: ``unit_bytes`` are those of a unit's full parameters."""

    rest_bytes: int
    forward_bytes: int
    backward_bytes: int
    unit_bytes: int


class Paced(WrappedComm):
    """A communicator whose steps' works are complete when issued, or only when waited for."""

    def __init__(self, inner: Comm, at_once: bool):
        super().__init__(inner)
        self._at_once = at_once

    def duplicate(self) -> Comm:
        """Return one over the same ranks that is paced, too."""
        return Paced(super().duplicate(), self._at_once)

    def all_gather(self, *args: Any, **kwargs: Any) -> Work:
        return self._paced(super().all_gather(*args, **kwargs))

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        return self._paced(super().reduce_scatter(*args, **kwargs))

    def all_reduce(self, *args: Any, **kwargs: Any) -> Work:
        return self._paced(super().all_reduce(*args, **kwargs))

    def _paced(self, work: Work) -> Work:
        return _PacedWork(work, self._at_once)


class _PacedWork:
    """A fake collective's work, which would call itself incomplete for ever."""

    def __init__(self, work: Any, at_once: bool):
        self._work, self._complete = work, at_once

    def wait(self) -> None:
        self._work.wait()
        self._complete = True

    def is_completed(self) -> bool:
        return self._complete


class _BlockStack(nn.Module):
    """The blocks of a GPT, without embedding and head."""

    def __init__(self, shape: Transformer):
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.rotary = Rotary(shape.head_width, shape.context, shape.rope_theta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.rotary)
        return x


def _fsdp2(model: _BlockStack) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # also where there is a GPU
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        torch_fsdp.fully_shard(block, mesh=mesh)
    torch_fsdp.fully_shard(model, mesh=mesh)
    for earlier, later in pairwise(blocks):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])
    return model


def _ours(at_once: bool) -> Callable[[_BlockStack], nn.Module]:
    def shard(model: _BlockStack) -> nn.Module:
        world = dist.group.WORLD
        assert world is not None
        mesh: Any = Paced(ProcessGroupComm(world), at_once)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        set_prefetch(model, forward=1, backward=1)
        return model

    return shard


_ENGINES: dict[str, Callable[[_BlockStack], nn.Module]] = {
    "FSDP2": _fsdp2,
    "fully_shard": _ours(at_once=True),
    "fully_shard, collectives late": _ours(at_once=False),
}


def prove_memory(scene: Scene, timeout_s: float) -> Section:
    """Count all engines' bytes in one process. Raises `FullshardError` if it fails or is late."""
    # The profiler writes to stderr, which is kept here for a failure.
    program = f"from fullshard.prove.memory import Scene, count_all; print(count_all({scene!r}))"
    held = {
        name: CountedBytes(**each)
        for name, each in json.loads(ask_python(["-c", program], timeout_s)).items()
    }
    unit_mb = held["FSDP2"].unit_bytes / 1e6
    how = _HOW.format(scene=scene, unit_mb=unit_mb)
    data = {name: asdict(each) for name, each in held.items()}
    return Section(f"Memory of one of {scene.ranks} ranks", how, tuple(memory_claims(held)), data)


def memory_claims(held: Mapping[str, CountedBytes]) -> Iterator[Claim]:
    """Judge bytes by the name of the engine; the first is PyTorch's, and the others are ours."""
    (peer, theirs), *ours = held.items()
    for name, mine in ours:
        yield Claim.that(
            f"{name}: at rest no more than {peer}",
            mine.rest_bytes <= theirs.rest_bytes * _MORE,
            f"{mine.rest_bytes / 1e6:.2f} MB",
            f"{theirs.rest_bytes / 1e6:.2f} MB, and 1%",
        )
        for what in ("forward", "backward"):
            mine_units, their_units = (
                getattr(each, f"{what}_bytes") / each.unit_bytes for each in (mine, theirs)
            )
            yield Claim.that(
                f"{name}: transient in {what} no more than {peer}",
                mine_units <= their_units,
                f"{mine_units:.2f} units",
                f"{their_units:.2f} units",
            )


def count_all(scene: Scene) -> str:
    """Count every engine's bytes in this process, which has no group; return them as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=scene.ranks)
    try:
        return json.dumps({name: asdict(_count(each, scene)) for name, each in _ENGINES.items()})
    finally:
        dist.destroy_process_group()


def _count(shard: Callable[[_BlockStack], nn.Module], scene: Scene) -> CountedBytes:
    gc.collect()
    plain = _BlockStack(scene.shape)
    unit_bytes = sum(p.numel() * p.element_size() for p in plain.blocks[0].parameters())
    del plain

    def run(mark: Callable[[str], None]) -> None:
        model = shard(_BlockStack(scene.shape))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        take_marked_step(model, optimizer, torch.ones(1, 1, scene.width), mark)

    held = held_bytes(run)
    rest = held["rest"]
    return CountedBytes(rest, held["forward"] - rest, held["backward"] - rest, unit_bytes)


def held_bytes(run: Callable[[Callable[[str], None]], None]) -> dict[str, int]:
    """Return the bytes that the CPU allocator has given out while ``run`` runs, from its begin on.

    ``run(mark)`` marks `FORWARD` and `BACKWARD` where they begin, and `OVER`: ``forward`` and
    ``backward`` are the peaks until the next mark, ``rest`` is what is held at the last one.
    """

    def mark(name: str) -> None:
        with record_function(name):
            pass

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        run(mark)
    peaks: dict[str, int] = {}
    live, phase = 0, ""
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == OVER:
            return {"rest": live, "forward": peaks[FORWARD], "backward": peaks[BACKWARD]}
        if event.name() in (FORWARD, BACKWARD):
            phase = event.name()
        elif event.name() == "[memory]":
            live += event.nbytes()
        peaks[phase] = max(peaks.get(phase, 0), live)
    raise RuntimeError("the profiler has no record of the step's end")


def take_marked_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    mark: Callable[[str], None],
) -> None:
    """Take some steps, and one between marks that ends with its backward; see `held_bytes`."""
    for _ in range(_WARM_UP_STEPS):
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()  # what reference cycles keep alive is nobody's to hold
    mark(FORWARD)
    loss = model(inputs).sum()
    mark(BACKWARD)
    loss.backward()
    del loss
    mark(OVER)
