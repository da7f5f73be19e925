# SPDX-License-Identifier: Apache-2.0
"""The choice of the parameters that stay whole, and of the ranks that own them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.grouping import deal_out, muon_work
from fullshard.core.layout import Align
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.unit.sites import ParamSites

AlignOrMatrix = Align | Literal["matrix"]
"""The places where parameters may be cut; "matrix": nowhere, see [Note: Whole matrices]."""

_loads: "WeakKeyDictionary[Comm, list[float]]" = WeakKeyDictionary()
"""The work of the optimizers on what each rank owns already, by who shares slices."""


def tables_of(root: nn.Module) -> set[int]:
    """Return identities of embeddings' dicts below ``root``: tables are only looked up."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    return {id(each._parameters) for each in root.modules() if isinstance(each, tables)}


def is_matrix(each: ParamSites, tables: Collection[int]) -> bool:
    """Return True for a parameter that ``align="matrix"`` keeps whole: a matrix, or a stack."""
    cut = each.tensor_parallel
    plain = (cut is None or cut.is_of_stacks) and not each.spec.apart
    numbers = each.param.is_floating_point() and len(each.spec.shape) > 1 and each.spec.numel > 0
    return plain and numbers and not any(id(table) in tables for table, _ in each.sites)


class WholeMatrices:
    """Matrices that stay whole, dealt out to ranks all together however many units they are in.

    For ``align`` of `fully_shard`, which sees one unit at a time and with ``"matrix"`` deals out
    each by itself, on top of those before. Make it of ``modules`` before they are sharded, alike on
    all ranks, and pass it with each of them: the work of ranks is then as even as in the wrapper.
    Raises `ConfigurationError` for what is not a module.
    """

    def __init__(self, *modules: nn.Module):
        for each in modules:
            if not isinstance(each, nn.Module):
                raise ConfigurationError(
                    f"WholeMatrices takes modules one by one, got a {type(each).__name__}"
                )
        tables = set().union(*map(tables_of, modules))
        inside = (each._parameters for module in modules for each in module.modules())
        named = (values.values() for values in inside if id(values) not in tables)
        self._works: Any = WeakIdKeyDictionary()
        for param in (param for params in named for param in params):
            if param is not None and param.is_floating_point() and param.dim() > 1:
                self._works[param] = muon_work(tuple(param.shape))
        self._owners: WeakKeyDictionary[Comm, Any] = WeakKeyDictionary()

    def owner_of(self, param: nn.Parameter, comm: Comm) -> int | None:
        """Return the rank of ``comm`` that owns ``param``; None if it is none of the matrices."""
        if comm not in self._owners:
            loads = _loads.setdefault(comm, [0.0] * comm.size)
            works = dict(self._works.items())
            dealt = deal_out(list(works.values()), loads)
            self._owners[comm] = WeakIdKeyDictionary(dict(zip(works, dealt, strict=True)))
        owner: int | None = self._owners[comm].get(param)
        return owner


def matrices_owned(
    units: Sequence[tuple[Sequence[ParamSites], Ranks]],
    whole: Callable[[ParamSites], bool],
    together: WholeMatrices | None = None,
) -> list[list[ParamSites]]:
    """Give the matrices of ``units``, those that are to be ``whole``, to ranks, one each.

    All of them are dealt out together, on top of what their ranks own of units before, but those
    that ``together`` has dealt out with others.
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
        if together is not None:
            for number, i in places:
                owner = together.owner_of(units[number][0][i].param, comm)
                if owner is not None:
                    owners[number, i] = owner
            places = [place for place in places if place not in owners]
        loads = _loads.setdefault(comm, [0.0] * comm.size)
        works = [muon_work(units[number][0][i].spec.shape) for number, i in places]
        owners.update(zip(places, deal_out(works, loads), strict=True))
    return [
        [
            replace(each, spec=replace(each.spec, owner=owners.get((number, i))))
            for i, each in enumerate(params)
        ]
        for number, (params, _) in enumerate(units)
    ]
