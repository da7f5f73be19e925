# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `torch.utils.checkpoint`: if one runs around a forward, and how it recomputes."""

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode


def checkpoint_around() -> Any:
    """Return a hook of the innermost checkpoint without reentrance that runs; None if none does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks is not None and hooks[0].__module__ == checkpoint.__name__ else None


def is_recomputation() -> bool:
    """True in what a checkpoint without reentrance runs again: no gradient will come of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename == checkpoint.__file__ and code.co_name in ("unpack_hook", "backward"):
            return code.co_name == "unpack_hook"  # "backward" of a reentrant one, which counts
        frame = frame.f_back
    return False


def checkpointed_module() -> nn.Module | None:
    """Return the module that the innermost `checkpoint` on the stack runs; None if a function."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    inside = dropwhile(lambda frame: frame.f_code.co_filename != checkpoint.__file__, frames)
    names = next((f.f_locals for f in inside if {"function", "fn"} & f.f_locals.keys()), {})
    function = names.get("function", names.get("fn"))  # at first, and again
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__self__", function)
    return module if isinstance(module, nn.Module) else None


def counts_operations() -> bool:
    """True if a selective checkpoint looks at each operation, to keep or to find its result."""
    return type(_get_current_dispatch_mode()).__module__ == checkpoint.__name__


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Run operations unseen by selective checkpoints.

    A recomputation need not do what its forward did, as a unit may be gathered already.
    """
    modes = []
    while counts_operations():
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def is_early_stop(failure: BaseException) -> bool:
    """True for what ends a recomputation once all is there that backward needs."""
    return type(failure).__module__ == checkpoint.__name__


class _Saved(torch.autograd.Function):
    """A node that saves its input: see `save_in_checkpoint`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return tensor.clone()

    @staticmethod
    def backward(_ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


def save_in_checkpoint(outputs: Sequence[Tensor]) -> "weakref.ref[Tensor]":
    """Let the checkpoint that runs save something, and return the tensor whose node has it.

    It lives as long as the graph behind the ``outputs`` of a call inside the checkpoint.
    """
    lead = torch.zeros((), device="cpu", requires_grad=True)
    saved: Tensor = _Saved.apply(lead)  # type: ignore[no-untyped-call]
    for tensor in outputs:
        node: Any = tensor.grad_fn
        if node is not None:
            # The tensor, not its node: in torch 2.11 a node in Python does not keep itself.
            node.metadata.setdefault(_Saved, []).append(saved)
    return weakref.ref(saved)


def recompute(saved: Sequence[Tensor]) -> None:
    """Run again what checkpoints ran that have ``saved`` these, in the backward that runs."""
    for tensor in saved:
        _ = tensor.grad_fn.saved_tensors  # type: ignore[union-attr]
