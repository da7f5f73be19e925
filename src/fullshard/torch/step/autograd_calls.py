# SPDX-License-Identifier: Apache-2.0
"""Calls of autograd that name sharded parameters, which are in no graph: refused by name.

`torch.autograd.grad` would say that they are unused, and ``backward(inputs=...)`` would do
nothing at all. Autograd tells nobody what it was asked for, so what both functions hand to its
engine is looked at. (The functions themselves stay what they are: compilers know them.)
"""

import functools
import threading
from typing import Any

import torch

from fullshard.core.errors import UsageError
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["watch_autograd"]

_ENGINE = "_engine_run_backward"
_INPUTS = 4  # behind outputs, their gradients, retain_graph and create_graph

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
            return run(*args, **kwargs)

        setattr(torch.autograd, _ENGINE, checked)


def _refuse_sharded(inputs: Any) -> None:
    for each in inputs:
        if isinstance(each, ShardedParameter):
            raise UsageError(
                "torch.autograd.grad and backward(inputs=...) cannot take gradients for "
                f"{each.ownership}: the graph has full parameters, whose gradients are reduced "
                "when backward has left their unit. Call loss.backward() without inputs and read "
                "param.grad; to leave parameters out, param.requires_grad_(False) before forward"
            )
