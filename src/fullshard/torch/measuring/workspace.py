# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels on a CPU take for themselves while they run, beside what they return.

oneDNN convolves in a blocked layout: inputs, weights and outputs of another layout are copied into
it and back. Measured with torch 2.13 by the profiler's record of the allocator; fake tensors do not
see any of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["workspace_bytes"]


def workspace_bytes(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Bytes that ``func`` of ``args`` holds while it runs on a CPU, beside its ``outputs``."""
    rule = _RULES.get(func._overloadpacket.__name__)
    if rule is None or not outputs or outputs[0].device.type != "cpu":
        return 0
    return rule(args, outputs)


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    given, weight, output = args[0], args[1], outputs[0]
    if _is_blocked(given):
        return 0
    return max(_size(given) + _size(weight), _size(output))


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad, given = args[0], args[1]
    if _is_blocked(given):
        return 0
    copied = 0 if grad.is_contiguous() else _size(grad)
    return copied + _size(grad) + _size(given)


def _batch_norm_backward(args: Sequence[Any], _outputs: Sequence[Tensor]) -> int:
    return _size(args[1]) if args[0].is_contiguous() else 0


_RULES: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _batch_norm_backward,
}


def _is_blocked(tensor: Tensor) -> bool:
    """True if oneDNN takes the tensor as it is."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
