# SPDX-License-Identifier: Apache-2.0
"""Compare texts across ranks: hashes first, and the texts themselves only if the hashes differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.protocol import Comm, members_of
from fullshard.torch.comm.texts import share_bytes

_LINES_SHOWN = 20


def verify_agreement(
    comm: Comm,
    lines: Mapping[str, str],
    device: torch.device,
    subject: str = "what to shard",
    beside: Tensor | None = None,
) -> None:
    """Make sure that all ranks of ``comm`` pass equal ``lines``, such as {"strategy": "SHARD_OP"}.

    Collective over ``comm``: one all-reduce of 32 bytes on ``device``, waited for on the host. With
    it goes ``beside``, a vector of int64, which gets the largest of all ranks' values in its place.
    Raises `ConfigurationError` on all ranks if a line differs or is missing on one, and says which;
    ``subject`` tells people what the lines are about.
    """
    texts = differing_texts(comm, json.dumps(dict(lines), sort_keys=True), device, subject, beside)
    if texts is None:
        return
    told: list[dict[str, str]] = [json.loads(text) for text in texts]
    differences = []
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, "(missing)") for each in told]
        if len(set(values)) > 1:
            differences.append(f"\n  {name}: {by_rank(comm, values)}")
    more = len(differences) - _LINES_SHOWN
    raise ConfigurationError(
        f"the ranks disagree about {subject}; build the same module and pass the same arguments "
        "on every rank" + "".join(differences[:_LINES_SHOWN]) + f"\n  and {more} more" * (more > 0)
    )


def differing_texts(
    comm: Comm,
    text: str,
    device: torch.device,
    subject: str = "texts",
    beside: Tensor | None = None,
) -> list[str] | None:
    """Return all ranks' texts if any two differ, else None. As `verify_agreement`, collective."""
    if comm.size == 1:
        return None
    bounds = bounds_of(text.encode()).to(device)
    further = () if beside is None else (beside.to(device),)
    bounds = torch.cat([bounds, *further])
    comm.all_reduce([bounds], "max", label=f"comparison of {subject}").wait()
    if beside is not None:
        beside.copy_(bounds[4:])
    if are_alike(bounds[:4]):
        return None
    return [data.decode() for data in share_bytes(comm, text.encode(), device)]


def bounds_of(data: bytes) -> Tensor:
    """Return four int64 whose maxima over ranks tell if all ranks have the same ``data``."""
    digest = hashlib.blake2b(data, digest_size=16).digest()
    halves = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    # The largest complement is the complement of the smallest: one call gives both bounds.
    return torch.cat([halves, ~halves])


def are_alike(bounds: Tensor) -> bool:
    """Return True if the maxima of `bounds_of` say that all ranks have the same."""
    return torch.equal(bounds[:2], ~bounds[2:])


def by_rank(comm: Comm, values: Sequence[str]) -> str:
    """Tell who says what: ``A on rank 0; B on ranks 1, 2``, in ranks of the world if possible."""
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(members_of(comm), values, strict=True):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' * (len(which) > 1)} {', '.join(map(str, which))}"
        for value, which in ranks.items()
    )
