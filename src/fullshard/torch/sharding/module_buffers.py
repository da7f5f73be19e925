# SPDX-License-Identifier: Apache-2.0
"""Moves and casts of the buffers of modules."""

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.torch.unit.sites import clean_name

_BUFFER_DTYPES = "_fullshard_buffer_dtypes"


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers below ``module`` to where its parameters will be."""
    for each in module.modules():
        for key, buffer in each._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                each._buffers[key] = buffer.to(device)


def cast_buffers(
    module: nn.Module, dtype: torch.dtype, except_for: Sequence[type[nn.Module]] = ()
) -> None:
    """Cast floating-point buffers but those of ``except_for``; see `buffer_dtypes`."""
    for each in module.modules():
        if isinstance(each, tuple(except_for)):
            continue
        for key, buffer in each._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                each.__dict__.setdefault(_BUFFER_DTYPES, {}).setdefault(key, buffer.dtype)
                each._buffers[key] = buffer.to(dtype)


def buffer_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Return, by name, the dtypes of buffers below ``module`` before `cast_buffers`."""
    return {
        clean_name(f"{path}.{key}" if path else key): dtype
        for path, each in module.named_modules()
        for key, dtype in each.__dict__.get(_BUFFER_DTYPES, {}).items()
    }
