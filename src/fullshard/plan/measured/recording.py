# SPDX-License-Identifier: Apache-2.0
"""One forward and backward of a plain model, told without a framework.

A recording knows nothing of units, ranks or precision at rest: it says which modules ran when, what
memory came and went in between, which operations were done and when each gradient was there. The
planner puts any wrapping over it, since it can tell for every module when its forward and backward
begin and end.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.core.text import write_whole


class MarkKind(Enum):
    """The subject of a mark in a recording; ``number`` of the mark counts calls, blocks, ..."""

    __hash__: Any = object.__hash__  # that of Enum is slow, and a step has thousands of marks

    FORWARD_BEGIN = "forward_begin"  # of call ``number``
    FORWARD_END = "forward_end"
    OUTPUT_GRADIENT = "output_gradient"  # a gradient of an output of the call is there
    OUTPUTS_GONE = "outputs_gone"  # no backward can reach the call through its outputs any more
    INPUT_GRADIENT = "input_gradient"  # the gradient of watched input ``number`` is there
    INPUT_GONE = "input_gone"  # the node that made it is gone
    GRADIENT = "gradient"  # of parameter ``number``; its memory is given away now
    NO_GRADIENT = "no_gradient"  # autograd came to parameter ``number``, with nothing to add
    ALLOCATE = "allocate"  # block ``number``
    RELEASE = "release"
    OP = "op"  # operation ``number``
    TASK = "task"  # what follows runs in autograd's graph task ``number``, 0 at first
    BACKWARD_OVER = "backward_over"  # autograd has nothing left to do


_OF_THE_STEP = (MarkKind.TASK, MarkKind.BACKWARD_OVER)


class StepMark(NamedTuple):
    """Something that happened, in the order in which it did."""

    kind: MarkKind
    number: int = -1


class MemoryUse(Enum):
    """The purpose of a block of memory."""

    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits and loss"


@dataclass(frozen=True)
class RecordedCall:
    """One forward of a module.

    ``leads_back`` is true if a backward can come to it, ``with_grad`` if it ran with gradients
    enabled.
    """

    module: str
    leads_back: bool = True
    with_grad: bool = True


class WatchedInput(NamedTuple):
    """An input of call ``call`` that needs a gradient.

    Of a tensor that several calls take, the first one watches the tensor itself, and each other a
    view of its own: ``source`` is then the number of the input that it is a view of, else -1. A
    ``leaf`` was made by no operation, and outlives the graph.
    """

    call: int
    source: int = -1
    leaf: bool = False


@dataclass(frozen=True)
class RecordedOp:
    """One operation on the device: multiplications and additions, and bytes read and written.

    ``module`` is the path of the innermost module that runs it (in backward: of the call whose
    backward has begun last).
    """

    name: str
    module: str
    flops: float
    bytes: int


@dataclass(frozen=True)
class StepRecording:
    """A recorded step: its parameters, and marks in order.

    ``blocks`` holds (bytes, use) of each block of memory. ``compute_dtype`` is the dtype that
    floating-point parameters had, None if they kept their own. ``buffers_bytes`` are those of the
    modules' buffers, which every rank has whole.
    """

    params: tuple[ParamSpec, ...]
    calls: tuple[RecordedCall, ...]
    inputs: tuple[WatchedInput, ...]
    blocks: tuple[tuple[int, MemoryUse], ...]
    ops: tuple[RecordedOp, ...]
    marks: tuple[StepMark, ...]
    compute_dtype: str | None = None
    buffers_bytes: int = 0

    def __iter__(self) -> Iterator[StepMark]:
        return iter(self.marks)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of blocks that were alive at one moment."""
        live = peak = 0
        for kind, number in self.marks:
            if kind is MarkKind.ALLOCATE:
                live += self.blocks[number][0]
                peak = max(peak, live)
            elif kind is MarkKind.RELEASE:
                live -= self.blocks[number][0]
        return peak

    @property
    def flops(self) -> float:
        """Operations of all of it together."""
        return sum(op.flops for op in self.ops)

    def save(self, path: str | Path) -> None:
        """Write the recording as JSON."""
        written = {
            "params": [asdict(param) for param in self.params],
            "calls": [asdict(call) for call in self.calls],
            "inputs": self.inputs,
            "blocks": [[size, use.value] for size, use in self.blocks],
            "ops": [asdict(op) for op in self.ops],
            "marks": [[mark.kind.value, mark.number] for mark in self.marks],
            "compute_dtype": self.compute_dtype,
            "buffers_bytes": self.buffers_bytes,
        }
        write_whole(path, json.dumps(written))

    @classmethod
    def load(cls, path: str | Path) -> "StepRecording":
        """Read what `save` wrote; anything else raises `ConfigurationError`."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            recording = cls(
                tuple(_param(each) for each in read["params"]),
                tuple(RecordedCall(**each) for each in read["calls"]),
                tuple(WatchedInput(call, source, leaf) for call, source, leaf in read["inputs"]),
                tuple((int(size), MemoryUse(use)) for size, use in read["blocks"]),
                tuple(RecordedOp(**each) for each in read["ops"]),
                tuple(StepMark(MarkKind(kind), int(number)) for kind, number in read["marks"]),
                read["compute_dtype"],
                int(read["buffers_bytes"]),
            )
            recording._check()
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} is no recording of a step: {error!r}") from error
        return recording

    def _check(self) -> None:
        numbered: dict[MarkKind, Sequence[object]] = {
            MarkKind.GRADIENT: self.params,
            MarkKind.NO_GRADIENT: self.params,
            MarkKind.INPUT_GRADIENT: self.inputs,
            MarkKind.INPUT_GONE: self.inputs,
            MarkKind.ALLOCATE: self.blocks,
            MarkKind.RELEASE: self.blocks,
            MarkKind.OP: self.ops,
        }
        for kind, number in self.marks:
            known = len(numbered.get(kind, self.calls))
            if kind not in _OF_THE_STEP and not 0 <= number < known:
                raise ValueError(f"{kind.value} of number {number}, of which there are {known}")
        for number, (call, source, leaf) in enumerate(self.inputs):
            if not isinstance(leaf, bool):
                raise ValueError(f"input {number} is a leaf or not, which {leaf!r} does not tell")
            if not (0 <= call < len(self.calls) and -1 <= source < number):
                raise ValueError(f"input {number} is of call {call} and from input {source}")


def _param(read: dict[str, object]) -> ParamSpec:
    shape, aliases = read.pop("shape"), read.pop("aliases")
    if not isinstance(shape, list) or not isinstance(aliases, list):
        raise ValueError("a parameter's shape and aliases are lists")
    return ParamSpec(**read, shape=tuple(shape), aliases=tuple(aliases))  # type: ignore[arg-type]
