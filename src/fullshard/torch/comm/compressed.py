# SPDX-License-Identifier: Apache-2.0
"""A communicator around another one that sends a unit's gathers and reduces in fewer bytes.

As in ZeRO++ (arXiv:2306.10209), weights are quantised for a gather while the shards stay what they
are, and gradients are quantised once, exchanged, and added up in float32, so that rounding does not
grow with the number of ranks as it would in a ring.

[Note: Equal weights]
All ranks must compute with the same weights, bit by bit. So a rank decodes its own slice from its
own message, as the others do, instead of copying the exact one.

[Note: Error feedback]
The rounding error of a message is added to the next gradients before these are quantised (1-bit
Adam, arXiv:2102.02888; arXiv:1901.09847). Over many steps the messages then add up to the exact
gradients, so rounding introduces no bias. A rank keeps these errors for the slices of all other
ranks, in bfloat16; it adds its own slice exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.codecs import BlockCodec, CastCodec, Codec, add_up, decode, encode
from fullshard.torch.comm.protocol import Comm, Full, Parts, Together, Work, WrappedComm


def _codec_of(kind: str | None, block_numel: int) -> Codec | None:
    """Make the codec that a name in `CommunicationCompression` stands for."""
    if kind is None:
        return None
    if kind == "bf16":
        return CastCodec()
    return BlockCodec(block_numel, torch.int8 if kind == "int8" else torch.float8_e4m3fn)


@dataclass(frozen=True)
class CommunicationCompression:
    """Options to send a unit's gathers and reduces in fewer bytes; None leaves them as they are.

    Compression rounds numbers; docs/modes/compression.md tells what each choice costs a model.
    Parameters, gradients and optimizer state rest uncompressed, and state dicts are exact.

    Attributes:
        gather: "bf16", or "int8" or "fp8" (e4m3) with a scale for each block of numbers. Forward
            and backward compute with weights that are rounded so, in the dtype of computation.
        reduce: "bf16" or "int8". Each rank's gradients are rounded once and added up in float32.
        block_numel: numbers that share a scale of 4 bytes, for int8 and fp8; a multiple of 32, at
            most 65,536. Fewer are closer and take more bytes.
        error_feedback: add what rounding has left out of gradients to those of the next reduce.
            Keeps 2 bytes for each parameter that other ranks hold; not saved in state dicts.

    bf16 takes what travels in float32; int8 and fp8 also take bfloat16 and float16.

    Raises:
        ConfigurationError: if a name is unknown, a size is invalid, or a choice has no effect.
    """

    gather: Literal["bf16", "int8", "fp8"] | None = None
    reduce: Literal["bf16", "int8"] | None = None
    block_numel: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        for name, known in (("gather", ("bf16", "int8", "fp8")), ("reduce", ("bf16", "int8"))):
            given = getattr(self, name)
            if given is not None and given not in known:
                raise ConfigurationError(
                    f"compression: {name} must be one of {', '.join(known)} or None, got {given!r}"
                )
        if self.gather is None and self.reduce is None:
            raise ConfigurationError(
                "CommunicationCompression compresses nothing: name gather, reduce or both, or pass "
                "compression=None"
            )
        size = self.block_numel
        if (
            not isinstance(size, int)
            or isinstance(size, bool)
            or size % 32
            or not 0 < size <= 2**16
        ):
            raise ConfigurationError(
                f"compression: block_numel must be a multiple of 32 up to 65,536, got {size!r}"
            )
        if self.error_feedback and self.reduce is None:
            raise ConfigurationError(
                "compression: error_feedback is about reduces; name reduce, too, or leave it out"
            )


def check_compression(given: Any) -> None:
    """Raise `ConfigurationError` unless given a `CommunicationCompression` or None."""
    if given is not None and not isinstance(given, CommunicationCompression):
        raise ConfigurationError(
            f"compression must be a CommunicationCompression or None, got {given!r} "
            "(take the class from fullshard.torch)"
        )


class CompressedComm(WrappedComm):
    """A communicator whose gathers and reduces send compressed floating-point numbers.

    Made for one unit, whose rounding errors it keeps for error feedback. Tensors of dtypes
    that the chosen codec does not make smaller travel as they are, and so do all other calls.
    """

    def __init__(self, comm: Comm, compression: CommunicationCompression):
        super().__init__(comm)
        self.compression = compression
        self._gather = _codec_of(compression.gather, compression.block_numel)
        self._reduce = _codec_of(compression.reduce, compression.block_numel)
        self._residuals: list[Tensor] = []

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback keeps between reduces."""
        return sum(each.nbytes for each in self._residuals)

    # ---- what is compressed ---------------------------------------------------------------------

    def all_gather(self, pairs: Sequence[tuple[Full, Tensor]], label: str = "") -> Work:
        """See `Comm.all_gather` and [Note: Equal weights]. All pairs travel in one call."""
        codec = self._gather
        sent: list[tuple[Full, Tensor]] = []
        coded: list[tuple[Tensor, Tensor]] = []
        for full, shard in pairs:
            if codec is None or not _takes(full, codec):
                sent.append((full, shard))
                continue
            numel = shard.numel()
            messages = _bytes(self.size, codec.message_bytes(numel), full.device)
            encode(codec, shard.view(1, numel), messages[self.rank : self.rank + 1])
            sent.append((messages.view(-1), messages[self.rank]))
            coded.append((messages, full.view(self.size, numel)))
        work = super().all_gather(sent, label)
        if codec is None or not coded:
            return work

        def finish() -> None:
            for messages, full in coded:
                decode(codec, messages, full)

        return Together([work], finish)

    def reduce_scatter(self, pairs: Sequence[tuple[Tensor, Full]], label: str = "") -> Work:
        """See `Comm.reduce_scatter`. Other ranks' parts come as messages; sums are in float32."""
        codec = self._reduce
        chosen = [(shard, full) for shard, full in pairs if codec and _takes(full, codec)]
        if codec is None or not chosen:
            return super().reduce_scatter(pairs, label)
        others = [(shard, full) for shard, full in pairs if not _takes(full, codec)]
        works = []
        if others:
            works.append(super().reduce_scatter(others, label))
        sizes = [codec.message_bytes(shard.numel()) for shard, _ in chosen]
        # One row for each other rank, in which the messages of all pairs lie side by side.
        sent = _bytes(self.size - 1, sum(sizes), chosen[0][0].device)
        received = torch.empty_like(sent)
        self._encode_parts(codec, chosen, torch.split(sent, sizes, dim=1))
        numels = [0 if rank == self.rank else sum(sizes) for rank in range(self.size)]
        parts = Parts(received.view(-1), numels), Parts(sent.view(-1), numels)
        works.append(super().all_to_all(*parts, label))

        def finish() -> None:
            messages = torch.split(received, sizes, dim=1)
            for (shard, full), each in zip(chosen, messages, strict=True):
                add_up(codec, each, full.chunk(self.size)[self.rank], self.rank, shard)

        return Together(works, finish, sent)

    def _encode_parts(
        self, codec: Codec, pairs: Sequence[tuple[Tensor, Tensor]], messages: Sequence[Tensor]
    ) -> None:
        """Write the other ranks' parts of each pair into its ``messages``, a row for each rank."""
        residuals = self._residuals_for(pairs)
        before, after = slice(None, self.rank), slice(self.rank, None)
        behind = slice(self.rank + 1, None)
        for number, (_, full) in enumerate(pairs):
            parts = full.view(self.size, -1)
            for ranks, rows in ((before, before), (behind, after)):
                residual = residuals[number][rows] if residuals else None
                encode(codec, parts[ranks], messages[number][rows], residual)

    def _residuals_for(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return the rounding errors to add to each pair's parts; empty without error feedback."""
        if not self.compression.error_feedback:
            return []
        numels = [shard.numel() for shard, _ in pairs]
        if [each.shape[1] for each in self._residuals] != numels:
            # The first reduce, or the unit was laid out anew and these belong to nothing any more.
            self._residuals = [
                torch.zeros(self.size - 1, numel, dtype=torch.bfloat16, device=full.device)
                for numel, (_, full) in zip(numels, pairs, strict=True)
            ]
        return self._residuals

    def reduce_scratch_bytes(self, full: Tensor) -> int:
        """Return the bytes of messages to and from other ranks, or those of the plain reduce."""
        if self._reduce is None or not self._reduce.takes(full.dtype):
            return super().reduce_scratch_bytes(full)
        return 2 * self.reduce_part_bytes(full) * (self.size - 1)

    # ---- what it costs on the wire --------------------------------------------------------------

    def gather_part_bytes(self, full: Tensor) -> int:
        """Return the bytes in which a slice of ``full`` travels to each other rank in a gather."""
        return _part_bytes(self._gather, full, self.size)

    def reduce_part_bytes(self, full: Tensor) -> int:
        """Return the bytes that a rank sends to each other rank in a reduce of ``full``."""
        return _part_bytes(self._reduce, full, self.size)

    def duplicate(self) -> "CompressedComm":
        return CompressedComm(self.inner.duplicate(), self.compression)


def _part_bytes(codec: Codec | None, full: Tensor, size: int) -> int:
    numel = full.numel() // size
    if codec is None or not codec.takes(full.dtype):
        return numel * full.element_size()
    return codec.message_bytes(numel)


def _bytes(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.uint8, device=device)


def _takes(full: Full, codec: Codec) -> TypeGuard[Tensor]:
    return isinstance(full, Tensor) and codec.takes(full.dtype) and full.numel() > 0
