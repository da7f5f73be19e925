# SPDX-License-Identifier: Apache-2.0
"""Does forward write to full parameters? The change would be dropped with them.

[Note: Writes in forward]
What is written to a parameter itself, under ``torch.no_grad()``, counts in its version, which is
looked at after every forward. What is written to ``param.data`` counts nowhere: so in the first
forward of each unit a checksum of the full parameters is taken before and after. Between steps,
writes to sharded parameters last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullshard.core.errors import UsageError
from fullshard.torch.tensor.tensor_parallel import held_here

__all__ = ["Writes", "checksum"]

_ROW_WORDS = 512


def checksum(tensor: Tensor) -> Tensor:
    """A 0-dim int64 of absolute value at most 2**62, on the device of ``tensor``.

    Equal for equal bits, whatever the device and the strides; for others it differs as good as
    always. Of a DTensor, the part on this rank counts.
    """
    data = held_here(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: len(data) // 8 * 8].view(torch.int64)
    rows = words[: len(words) // _ROW_WORDS * _ROW_WORDS].view(-1, _ROW_WORDS).sum(1)
    ends = torch.stack([words[rows.numel() * _ROW_WORDS :].sum(), data[len(words) * 8 :].sum()])
    sums = torch.cat([rows, ends])
    # An odd factor loses no bit; the constant spreads them.
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device) * 0x5851F42D4C957F2D
    return (sums * weights).sum() >> 1


class Writes:
    """The watch over one unit's full parameters, ``params``, for writes in forward."""

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self.versions = [param._version for param in params]  # as forward began
        self.is_first = True  # no forward has ended whose values were looked at
        self._sums: list[Tensor] | None = None

    def take_values(self) -> None:
        """Remember the values as forward begins."""
        if self._params and not isinstance(self._params[0], FakeTensor):
            self._sums = self._checksums()

    def check(self, versions: Sequence[int], names: Sequence[str]) -> None:
        """Raise `UsageError` with the ``names`` of parameters that forward has written to.

        ``versions`` are those at its end.
        """
        pairs = zip(names, versions, self.versions, strict=True)
        written = {name for name, now, before in pairs if now != before}
        if self._sums is not None:
            before, self._sums = self._sums, None
            differ = (torch.stack(before) != torch.stack(self._checksums())).tolist()
            written.update(name for name, each in zip(names, differ, strict=True) if each)
            self.is_first = bool(written)
        if written:
            raise UsageError(
                f"forward has written to {', '.join(map(repr, sorted(written)))}; full parameters "
                "are dropped after forward, and the change with them. Write between steps, to "
                "model.parameters() under torch.no_grad() (elementwise, as clamp_), or within "
                "summon_full_params; keep what is no parameter (codebooks, averages) as a buffer"
            )

    def _checksums(self) -> list[Tensor]:
        with torch.no_grad():
            return [checksum(param) for param in self._params]
