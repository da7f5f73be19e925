# SPDX-License-Identifier: Apache-2.0
"""Calls of autograd that name sharded parameters, which are in no graph: refused by name.

`torch.autograd.grad` would say that they are unused, and ``backward(inputs=...)`` would do
nothing at all. Autograd tells nobody what it was asked for, so both functions are looked at.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fullshard.core.errors import UsageError
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["watch_autograd"]

_lock = threading.Lock()
_watching = False


def watch_autograd() -> None:
    """Refuse sharded parameters as inputs of autograd's functions, from now on."""
    global _watching
    with _lock:
        if _watching:
            return
        _watching = True
        torch.autograd.grad = _checked(torch.autograd.grad, 1)
        torch.autograd.backward = _checked(torch.autograd.backward, 5)


def _checked(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """``function``, whose argument ``inputs`` is at ``position``, after a look at it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = args[position] if len(args) > position else kwargs.get("inputs")
        if inputs is not None:
            if isinstance(inputs, Iterator):  # which can be read once
                inputs = list(inputs)
                if len(args) > position:
                    args = (*args[:position], inputs, *args[position + 1 :])
                else:
                    kwargs["inputs"] = inputs
            _refuse_sharded(function.__name__, inputs)
        return function(*args, **kwargs)

    return call


def _refuse_sharded(name: str, inputs: Any) -> None:
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    elif isinstance(inputs, dict):
        inputs = inputs.values()
    for each in inputs if isinstance(inputs, Iterable) else ():
        if isinstance(each, ShardedParameter):
            raise UsageError(
                f"torch.autograd.{name} cannot take gradients for {each.ownership}: the graph has "
                "full parameters, whose gradients are reduced when backward has left their unit. "
                "Call loss.backward() without inputs and read param.grad; to leave parameters out, "
                "param.requires_grad_(False) before forward"
            )
