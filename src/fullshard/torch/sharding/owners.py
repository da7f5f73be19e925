# SPDX-License-Identifier: Apache-2.0
"""The choice of the parameters that stay whole, and of the ranks that own them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Literal
from weakref import WeakKeyDictionary

from torch import nn

from fullshard.core.errors import NotSupportedError
from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import Align
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.unit.sites import ParamSites

__all__ = ["AlignOrMatrix", "is_matrix", "matrices_owned", "tables_of"]

AlignOrMatrix = Align | Literal["matrix"]
"""The places where parameters may be cut; "matrix": nowhere, see [Note: Whole matrices]."""

_loads: "WeakKeyDictionary[Comm, list[float]]" = WeakKeyDictionary()
"""The work of the optimizers on what each rank owns already, by who shares slices."""


def tables_of(root: nn.Module) -> set[int]:
    """Return the identities of the dicts in which embeddings below ``root`` have their tables.

    These are looked up, not multiplied: no optimizer wants them as matrices.
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(each._parameters) for each in root.modules() if isinstance(each, tables)}


def is_matrix(each: ParamSites, tables: Collection[int]) -> bool:
    """Return True for a parameter that ``align="matrix"`` keeps whole."""
    plain = each.tensor_parallel is None and not each.spec.apart
    numbers = each.param.is_floating_point() and len(each.spec.shape) == 2 and each.spec.numel > 0
    return plain and numbers and not any(id(table) in tables for table, _ in each.sites)


def matrices_owned(
    units: Sequence[tuple[Sequence[ParamSites], Ranks]],
    whole: Callable[[ParamSites], bool],
) -> list[list[ParamSites]]:
    """Give the matrices of ``units``, those that are to be ``whole``, to ranks, one each.

    All of them are dealt out together, on top of what their ranks own of units before.
    Raises `NotSupportedError` for ``reshard_after_forward`` with a number.
    """
    owners: dict[tuple[int, int], int] = {}
    by_comm: dict[Comm, list[tuple[int, int]]] = {}
    for number, (params, ranks) in enumerate(units):
        chosen = [(number, i) for i, each in enumerate(params) if whole(each)]
        if chosen and ranks.block is not None:
            raise NotSupportedError(
                "reshard_after_forward with a number needs equal slices, and "
                'align="matrix" makes unequal ones: choose True or False'
            )
        by_comm.setdefault(ranks.gather, []).extend(chosen)
    for comm, places in by_comm.items():
        loads = _loads.setdefault(comm, [0.0] * comm.size)
        works = [muon_work(units[number][0][i].spec.shape) for number, i in places]
        owners.update(zip(places, deal_out(works, loads), strict=True))
    return [
        [_owned(each, owners.get((number, i))) for i, each in enumerate(params)]
        for number, (params, _) in enumerate(units)
    ]


def _owned(each: ParamSites, owner: int | None) -> ParamSites:
    return each if owner is None else replace(each, spec=replace(each.spec, owner=owner))
