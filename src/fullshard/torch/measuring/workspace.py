# SPDX-License-Identifier: Apache-2.0
"""Memory that kernels on a CPU take for themselves while they run, beside what they return.

oneDNN convolves in a blocked layout, channels in vectors: inputs, weights and outputs of another
layout are copied into it and back. Fake tensors do not see that. The rules are those of torch 2.13,
as the profiler's record of the allocator has shown them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
    blocked = _blocked_bytes(output)
    taken = 0 if _channels(given) < _LANES else _blocked_bytes(given) + _size(weight)
    return max(taken + blocked - _size(output), blocked)


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad, given = args[0], args[1]
    if _is_blocked(given):
        return 0
    copied = 0 if grad.is_contiguous() else _size(grad)
    for_weights = _blocked_bytes(grad, narrow=True) + _blocked_bytes(given, narrow=True)
    for_inputs = _blocked_bytes(grad) + _blocked_bytes(given) - _size(given)
    return copied + max(for_weights, for_inputs)


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


_LANES = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _channels(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.dim() > 1 else 1


def _blocked_bytes(tensor: Tensor, *, narrow: bool = False) -> int:
    """The size of a copy whose channels fill whole vectors; ``narrow`` ones if they are few."""
    channels = _channels(tensor)
    lanes = 8 if narrow and channels <= 8 else _LANES
    return _size(tensor) * (-(-channels // lanes) * lanes) // max(1, channels)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
