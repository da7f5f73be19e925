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
from fullshard.torch.tensor.checksum import checksum


class Writes:
    """The watch over one unit's full parameters, ``params``, for writes in forward."""

    def __init__(self, params: Sequence[Tensor]):
        self._params = params
        self.versions: list[int] | None = None  # as forward began, while it runs
        self.is_first: bool = True  # no forward has ended whose values were looked at
        self._sums: list[Tensor] | None = None

    def take_values(self) -> None:
        """Remember the values as forward begins."""
        if self._params and not isinstance(self._params[0], FakeTensor):
            self._sums = self._checksums()

    def check(self, versions: Sequence[int], names: Sequence[str]) -> None:
        """Raise `UsageError` with the ``names`` of parameters that forward has written to.

        ``versions`` are those at its end.
        """
        assert self.versions is not None
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
