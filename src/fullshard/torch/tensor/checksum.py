# SPDX-License-Identifier: Apache-2.0
"""A number that tells values apart, bit by bit and place by place.

[Note: Weights of places]
Words of 8 bytes are added up as integers, each times an odd weight of its place: rows of 512 KiB by
one set of weights, their sums by another. The weights are no linear function of the place, or the
same words in another order (a, b, b, a for b, a, a, b) would give the same sum; upper bits are
folded into lower ones first, or a product would lose them.
"""

import torch
from torch import Tensor

from fullshard.torch.tensor.tensor_parallel import held_here

_ROW_WORDS = 2**16
_DEVICE_ROWS = 2**8  # taken at once where each call is a kernel; a CPU takes what its cache holds


def checksum(tensor: Tensor) -> Tensor:
    """Return a 0-dim int64 of absolute value at most 2**62, on the device of ``tensor``.

    Equal for equal bits, whatever the device and the strides; for others, and for the same ones in
    another order, it differs as good as always. Of a DTensor, the part on this rank counts.
    """
    data = held_here(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    tail = data.new_zeros(8)
    tail[: len(data) % 8] = data[len(data) // 8 * 8 :]
    words = data[: len(data) // 8 * 8].view(torch.int64)
    whole = len(words) // _ROW_WORDS * _ROW_WORDS
    weights = _weights(min(len(words) + 1, _ROW_WORDS), words.device)
    at_once = 1 if data.device.type == "cpu" else _DEVICE_ROWS
    rows = torch.split(words[:whole].view(-1, _ROW_WORDS), at_once) if whole else ()
    sums = torch.cat([_weighed(each, weights) for each in (*rows, words[whole:].view(1, -1))])
    sums[-1] += _weighed(tail.view(torch.int64).view(1, 1), weights[len(words) - whole :])[0]
    return _weighed(sums.view(1, -1), _weights(len(sums), sums.device))[0] >> 1


def _weights(count: int, device: torch.device) -> Tensor:
    """Return the weights of the first ``count`` places."""
    weights = torch.arange(1, count + 1, device=device) * 0x5851F42D4C957F2D
    weights ^= weights >> 29
    weights *= 0x2545F4914F6CDD1D
    return weights | 1


def _weighed(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row."""
    folded = rows >> 32
    folded ^= rows
    folded *= weights[: rows.shape[1]]
    return folded.sum(1)
