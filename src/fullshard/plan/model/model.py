# SPDX-License-Identifier: Apache-2.0
"""The description of a model that planning needs, whichever framework it is written in."""

from typing import Protocol

from fullshard.core.spec import ModelSpec
from fullshard.plan.model.operations import ModelCall
from fullshard.plan.run import Run

__all__ = ["Model"]


class Model(Protocol):
    """Parameters and work of a model under a configuration.

    ``blocks`` are the paths of the repeated modules (layers), in order of execution: what is
    usually wrapped and recomputed. ``parts`` are finer modules that may become units instead
    (attention, feed-forward); they lie in blocks, or are large by themselves (embedding, head).
    """

    @property
    def name(self) -> str:
        """The name in tables."""
        ...

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the repeated modules."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """Paths of finer modules."""
        ...

    @property
    def experts(self) -> tuple[str, ...]:
        """Paths of the modules that hold stacked experts, which may be dealt out over devices."""
        ...

    @property
    def context(self) -> int:
        """Samples' length if the run does not say: tokens, 1 where there are none."""
        ...

    def spec(self, run: Run) -> ModelSpec:
        """All parameters of the plain model as they rest, in registration order; LoRA's are in."""
        ...

    def calls(self, run: Run) -> tuple[ModelCall, ...]:
        """The forward of one micro-batch, ending with the loss."""
        ...

    def model_flops(self, run: Run) -> float:
        """FLOPs of one sample's forward and backward that count for MFU: none recomputed."""
        ...
