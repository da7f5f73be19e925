# SPDX-License-Identifier: Apache-2.0
"""A model as planning knows it: parameters, and the work of forward and backward."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from fullshard.core.spec import ModelSpec
from fullshard.plan.run import Run


class Kind(Enum):
    """The part of a device that an operation keeps busy."""

    MATMUL = "matmul"  # matrix units, as a library's matrix multiplication
    ATTENTION = "attention"  # matrix units, as a fused attention kernel
    MEMORY = "memory"  # device memory: element by element, norms, softmax, look-ups
    WIRE = "wire"  # a collective inside forward, as tensor parallelism has
    EXCHANGE = "exchange"  # an all-to-all of rows, to experts and back


@dataclass(frozen=True)
class Workload:
    """One direction of an operation, on one device and one micro-batch.

    ``flops`` are those carried out, ``bytes`` what device memory reads and writes at least,
    ``kernels`` how many are launched. ``shape`` is (m, n, k) of a matrix multiplication, and
    ``count`` how many of that shape there are; (tokens, heads, width) of attention.
    """

    flops: float = 0.0
    bytes: float = 0.0
    kernels: int = 1
    shape: tuple[int, int, int] | None = None
    count: int = 1


@dataclass(frozen=True)
class Operation:
    """One operation of a module's forward, with its backward.

    ``saved_bytes`` stay from forward to backward, counted once: by the operation that makes the
    tensor, if any backward reads it. ``output_bytes`` is what it gives to the next operation.
    ``scratch_bytes`` is held only while its forward runs, ``backward_scratch_bytes`` its backward;
    of what is saved, or of gradients, ``held_bytes`` until the backward of all of the model ended.
    ``cheap`` ones are recomputed under selective recomputation, the others kept.
    """

    name: str
    kind: Kind
    forward: Workload
    backward: Workload
    saved_bytes: int = 0
    output_bytes: int = 0
    scratch_bytes: int = 0
    backward_scratch_bytes: int = 0
    held_bytes: int = 0
    cheap: bool = True
    logits: bool = False  # its memory is told apart from activations: logits and loss


@dataclass(frozen=True)
class ModelCall:
    """The forward of one module, in the order of execution.

    ``path`` is the module's, such as ``layers.0.attention``: the deepest unit around it is the one
    whose parameters it needs. ``kept_bytes`` is what a recomputed call keeps: ``input_bytes``, and
    ``cache_bytes`` of keys and values if its caller does. Equal modules share the very same
    ``operations``.
    """

    path: str
    operations: tuple[Operation, ...]
    input_bytes: int = 0
    cache_bytes: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept by a call that is recomputed."""
        return self.input_bytes + self.cache_bytes


class Model(Protocol):
    """Parameters and work of a model under a configuration.

    ``blocks`` are the paths of the repeated modules (layers), in order of execution: what is
    usually wrapped and recomputed. ``parts`` are finer modules that may become units instead
    (attention, feed-forward); they lie in blocks, or are large by themselves (embedding, head).
    """

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the repeated modules."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Paths of finer modules."""

    @property
    def experts(self) -> tuple[str, ...]:
        """Paths of the modules that hold stacked experts, which may be dealt out over devices."""

    @property
    def context(self) -> int:
        """Samples' length if the run does not say: tokens, 1 where there are none."""

    def spec(self, run: Run) -> ModelSpec:
        """All parameters of the plain model as they rest, in registration order; LoRA's are in."""

    def calls(self, run: Run) -> tuple[ModelCall, ...]:
        """The forward of one micro-batch, ending with the loss."""

    def model_flops(self, run: Run) -> float:
        """FLOPs of one sample's forward and backward that count for MFU: none recomputed."""
