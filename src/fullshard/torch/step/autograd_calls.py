# SPDX-License-Identifier: Apache-2.0
"""Calls of autograd that name sharded parameters, which are in no graph: refused by name.

`torch.autograd.grad` would say that they are unused, and ``backward(inputs=...)`` would do
nothing at all. Autograd tells nobody what it was asked for, so what both functions hand to its
engine is looked at. (The functions themselves stay what they are: compilers know them.)
"""

import functools
import sys
import threading
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.guards.freed import FREED_VERSION, REPLACED_VERSION

_ENGINE = "_engine_run_backward"
_INPUTS = 4  # behind outputs, their gradients, retain_graph and create_graph
_SPLIT = "stage_backward_input"  # of torch.distributed.pipelining
_FRAMES_FROM_STAGE = 8

_lock = threading.Lock()
_watching = False


def watch_autograd() -> None:
    """Refuse sharded parameters as inputs of autograd's functions, from now on."""
    global _watching
    with _lock:
        run = getattr(torch.autograd, _ENGINE, None)
        if _watching or run is None:  # another version of torch
            return
        _watching = True

        @functools.wraps(run)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if len(args) > _INPUTS and args[_INPUTS]:
                _refuse_sharded(args[_INPUTS])
                _refuse_split_backward()
            try:
                return run(*args, **kwargs)
            except RuntimeError as error:
                _name_what_was_freed(error)
                raise

        setattr(torch.autograd, _ENGINE, checked)


def _name_what_was_freed(error: RuntimeError) -> None:
    text = str(error)
    if f"at version {REPLACED_VERSION};" in text:
        raise UsageError(
            "backward needs full parameters of a unit that has others by now: requires_grad of "
            "some of its parameters was changed after the forward, and another forward with "
            "gradients has run before this backward. Run the backward of each forward before that, "
            "or the other forward under torch.no_grad()"
        ) from error
    if any(all(part in text for part in parts) for parts in _FREED):
        raise UsageError(
            "backward needs the full parameters of a unit that was freed after its forward, and "
            "has not come through the unit's outputs, which would have gathered it again: it "
            "began at a tensor from inside the unit. Return that tensor from the module's forward, "
            "take it by a forward hook, or keep it as an attribute of a module from the first "
            "forward on; or set reshard_after_forward=False (SHARD_GRAD_OP)"
        ) from error


_FREED = (
    ("modified by an inplace operation", f"at version {FREED_VERSION};"),
    ("setStorage", "storage of size 0"),
    ("data is not allocated yet",),
)


def _refuse_split_backward() -> None:
    """Refuse the first half of a backward that a pipeline's schedule has split.

    It wants gradients of inputs alone, like anybody's penalty. In the second half the schedule asks
    for those of the module's parameters, finds none in the graph, and goes on without a word.
    """
    for frame, _ in islice(walk_stack(sys._getframe()), _FRAMES_FROM_STAGE):
        if frame.f_code.co_name == _SPLIT:
            weights = frame.f_locals.get("weight_grad_fns", ())
            if any(isinstance(getattr(w, "variable", None), ShardedParameter) for w in weights):
                raise NotSupportedError(
                    "the pipeline's schedule splits backward into one for inputs and one for "
                    "weights (zero bubble), and the latter would find no sharded parameter in the "
                    "graph, which has full ones: take ScheduleGPipe, Schedule1F1B or "
                    "ScheduleInterleaved1F1B"
                )


def _refuse_sharded(inputs: Any) -> None:
    for each in inputs:
        if isinstance(each, ShardedParameter):
            raise UsageError(
                "torch.autograd.grad and backward(inputs=...) cannot take gradients for "
                f"{each.ownership}: the graph has full parameters, whose gradients are reduced "
                "when backward has left their unit. Call loss.backward() without inputs and read "
                "param.grad; to leave parameters out, param.requires_grad_(False) before forward"
            )
