# SPDX-License-Identifier: Apache-2.0
"""Tensors as entries of a file in the format of safetensors."""

import torch
from torch import Tensor

from fullshard.core.safetensors_format import Entry

__all__ = ["DTYPE_NAMES", "entries_of"]

# The format's names: https://github.com/huggingface/safetensors#format
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def entries_of(tensors: dict[str, Tensor]) -> dict[str, Entry]:
    """What a header tells of ``tensors``, which have dtypes of `DTYPE_NAMES`."""
    return {
        name: Entry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
