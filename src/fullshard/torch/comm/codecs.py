# SPDX-License-Identifier: Apache-2.0
"""Codecs that turn numbers into messages of fewer bytes, and messages back into numbers.

Numbers are matrices of a floating dtype with one row for each rank; so are their messages, in
uint8.

[Note: Few passes over memory]
A processor casts and multiplies as fast as it reads its cache, and several times faster than it
reads memory. So numbers are taken piece by piece: each piece goes through all its operations in
scratch that stays in the cache, and memory is read and written once. On a GPU pieces are large and
may span ranks, since there every operation is a launch.

[Note: What is not finite]
The scale of a block is that of its largest magnitude, which is infinite or NaN if one of the block
is. All numbers that are decoded with such a scale are infinite or NaN: what is not finite spreads
over its block and cannot get lost, whatever the codes are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_PIECE_NUMEL = 2**19
_PIECE_NUMEL_ON_GPU = 2**24
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # its inverse is finite

_Where = tuple[slice, slice]  # of ranks, and of rows of codes


class Codes(NamedTuple):
    """Codes of consecutive numbers in the messages of several ranks.

    ``place`` is where the numbers are among those of a rank. ``codes`` are (ranks, rows) or (ranks,
    rows, numbers of a block), then with ``scales`` (ranks, rows, 1), all of them views.
    """

    place: slice
    codes: Tensor
    scales: Tensor | None = None

    def of(self, numbers: Tensor) -> Tensor:
        """Return this part of ``numbers`` (ranks, numel) as a view in the shape of the codes."""
        return numbers[:, self.place].view(self.codes.shape)

    def at(self, where: _Where) -> "Codes":
        """Return a piece of these codes."""
        scales = None if self.scales is None else self.scales[where]
        return Codes(self.place, self.codes[where], scales)


class Codec(Protocol):
    """A way to send numbers in fewer bytes."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if numbers of this dtype get smaller."""

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` numbers, a multiple of 4."""

    def runs(self, messages: Tensor, numel: int) -> list[Codes]:
        """View the messages (ranks, bytes) as the codes of ``numel`` numbers per rank."""

    def write(self, numbers: Tensor, run: Codes, scratch: Tensor) -> None:
        """Round ``numbers``, float32, into ``run``. ``scratch`` is another tensor like them."""

    def read(self, run: Codes, out: Tensor) -> None:
        """Write the numbers of ``run`` into ``out``, float32."""


class CastCodec:
    """Numbers as bfloat16: half of float32's bytes, 8 bits of precision, the same range."""

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float32

    def message_bytes(self, numel: int) -> int:
        return _padded(2 * numel)

    def runs(self, messages: Tensor, numel: int) -> list[Codes]:
        return [Codes(slice(numel), messages[:, : 2 * numel].view(torch.bfloat16))]

    def write(self, numbers: Tensor, run: Codes, scratch: Tensor) -> None:
        run.codes.copy_(numbers)

    def read(self, run: Codes, out: Tensor) -> None:
        out.copy_(run.codes)


@dataclass(frozen=True)
class BlockCodec:
    """Numbers as codes of one byte, and for each ``block_numel`` of them a float32 scale.

    A scale is the block's largest magnitude over the largest code: 127 of int8, whose codes lie
    evenly; 448 of float8 (e4m3), whose codes are denser near zero. See [Note: What is not finite].
    """

    block_numel: int
    dtype: torch.dtype = torch.int8

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True for dtypes of two and four bytes."""
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def message_bytes(self, numel: int) -> int:
        """One for each number and four for each block, the last of which may be a part of one."""
        return _padded(numel) + 4 * -(-numel // self.block_numel)

    def runs(self, messages: Tensor, numel: int) -> list[Codes]:
        """See `Codec.runs`: whole blocks, then the part of one that may be left."""
        codes = messages[:, :numel].view(self.dtype)
        scales = messages[:, _padded(numel) :].view(torch.float32).unsqueeze(-1)
        blocks = numel // self.block_numel
        whole, ranks = blocks * self.block_numel, messages.shape[0]
        runs = []
        if blocks:
            rows = codes[:, :whole].view(ranks, blocks, self.block_numel)
            runs.append(Codes(slice(whole), rows, scales[:, :blocks]))
        if whole < numel:
            runs.append(
                Codes(slice(whole, numel), codes[:, whole:].unsqueeze(1), scales[:, blocks:])
            )
        return runs

    def write(self, numbers: Tensor, run: Codes, scratch: Tensor) -> None:
        codes, scales = run.codes, run.scales
        assert scales is not None
        whole = self.dtype is torch.int8
        largest = float(torch.iinfo(torch.int8).max if whole else torch.finfo(self.dtype).max)
        torch.amax(torch.abs(numbers, out=scratch), -1, keepdim=True, out=scales)
        scales.mul_(1 / largest).clamp_(min=_LEAST_SCALE)
        torch.mul(numbers, scales.reciprocal(), out=scratch)
        codes.copy_(scratch.round_() if whole else scratch)

    def read(self, run: Codes, out: Tensor) -> None:
        assert run.scales is not None
        if self.dtype is torch.int8:
            out.copy_(run.codes)
        else:
            _copy_float8(run.codes, out)
        out.mul_(run.scales)


def encode(codec: Codec, numbers: Tensor, messages: Tensor, residual: Tensor | None = None) -> None:
    """Write ``numbers`` (ranks, numel) into ``messages`` (ranks, bytes).

    With a ``residual`` like the numbers, of any dtype, the sums of both are written, and the
    residual becomes what the messages lack of them: nothing where something is not finite.
    """
    for run in codec.runs(messages, numbers.shape[1]):
        given = run.of(numbers)
        kept = None if residual is None else run.of(residual)
        for where, scratch, wide in _pieces(run.codes):
            piece, wanted = run.at(where), given[where]
            if kept is not None or wanted.dtype is not torch.float32:
                wanted = wide.copy_(wanted)
            if kept is None:
                codec.write(wanted, piece, scratch)
                continue
            wanted.add_(scratch.copy_(kept[where]))
            codec.write(wanted, piece, scratch)
            codec.read(piece, scratch)
            kept[where] = wanted.sub_(scratch).nan_to_num_(0.0, 0.0, 0.0)


def decode(codec: Codec, messages: Tensor, out: Tensor) -> None:
    """Write the numbers of ``messages`` (ranks, bytes) into ``out`` (ranks, numel)."""
    for run in codec.runs(messages, out.shape[1]):
        into = run.of(out)
        for where, scratch, _ in _pieces(run.codes):
            if out.dtype is torch.float32:
                codec.read(run.at(where), into[where])
            else:
                codec.read(run.at(where), scratch)
                into[where] = scratch


def add_up(codec: Codec, messages: Tensor, own: Tensor, place: int, out: Tensor) -> None:
    """``out`` (numel,) = the sum over the ranks in their order, in float32 and rounded once.

    ``messages`` (ranks - 1, bytes) come from the others, ``own`` (numel,) are the numbers of the
    rank at ``place``.
    """
    for all_runs in codec.runs(messages, out.numel()):
        runs: list[Codes | None] = [
            Codes(all_runs.place, all_runs.codes[n : n + 1], _row(all_runs.scales, n))
            for n in range(messages.shape[0])
        ]
        runs.insert(place, None)
        first = Codes(all_runs.place, all_runs.codes[:1])
        mine, into = first.of(own.unsqueeze(0)), first.of(out.unsqueeze(0))
        for where, scratch, wide in _pieces(first.codes):
            total = into[where] if out.dtype is torch.float32 else wide
            for number, run in enumerate(runs):
                part = scratch if number else total
                if run is not None:
                    codec.read(run.at(where), part)
                elif number and own.dtype is torch.float32:
                    part = mine[where]
                else:
                    part.copy_(mine[where])
                if number:
                    total.add_(part)
            if total is wide:
                into[where] = total


def _row(scales: Tensor | None, number: int) -> Tensor | None:
    return None if scales is None else scales[number : number + 1]


def _padded(count: int) -> int:
    return -(-count // 4) * 4


def _pieces(codes: Tensor) -> Iterator[tuple[_Where, Tensor, Tensor]]:
    """Yield slices of ranks and rows, with two float32 scratch tensors of their shape."""
    if not codes.numel():
        return
    ranks, rows, *block = codes.shape
    most = _PIECE_NUMEL if codes.device.type == "cpu" else _PIECE_NUMEL_ON_GPU
    rows_step = max(1, min(rows, most // (block[0] if block else 1)))
    ranks_step = max(1, min(ranks, most // codes[0].numel())) if rows_step == rows else 1
    shape = (2, ranks_step, rows_step, *block)
    scratch = torch.empty(shape, dtype=torch.float32, device=codes.device)
    for rank in range(0, ranks, ranks_step):
        for row in range(0, rows, rows_step):
            first, second = scratch[:, : ranks - rank, : rows - row]
            yield (slice(rank, rank + ranks_step), slice(row, row + rows_step)), first, second


def _copy_float8(codes: Tensor, out: Tensor) -> None:
    """Cast codes other than NaN by way of float16: on the CPU torch casts float8 one by one.

    Shifted left by seven, sign, exponent and fraction of e4m3 stand where float16 has them, but for
    a copy of the sign between; the exponent then is 8 too small.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    out.copy_(bits.view(torch.float16)).mul_(256.0)
