# SPDX-License-Identifier: Apache-2.0
"""A list of a model's parameters and units: who holds what, sharded or not."""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from fullshard.core.errors import UsageError
from fullshard.core.layout import Span
from fullshard.core.text import bytes_text, in_columns
from fullshard.torch.inspection.forecast import NamedUnit, named_units
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name
from fullshard.torch.unit.sites import clean_name


@dataclass(frozen=True)
class DescribedParameter:
    """One parameter; ``unit`` is None for one that is not sharded, and so whole on every rank.

    ``names`` are all its names in the model (several if it is tied), ``span`` the elements of the
    flattened parameter that this rank holds (of its own part, if tensor parallelism has cut it),
    ``bytes`` what they take, ``full_bytes`` what all take.
    """

    unit: str | None
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    span: Span
    bytes: int
    full_bytes: int


@dataclass(frozen=True)
class DescribedUnit:
    """One unit: the number of its slices, the ranks that hold each slice, and its bytes here.

    ``shard_bytes`` includes ``padding_bytes``. ``compute_dtypes`` are the dtypes of the gathered
    parameters, which take ``full_bytes``.
    """

    name: str
    slices: int
    replicas: int
    shard_bytes: int
    padding_bytes: int
    full_bytes: int
    compute_dtypes: tuple[str, ...]
    rests_on: str


@dataclass(frozen=True)
class Description:
    """The result of `describe`; ``str()`` is two tables and a line of totals."""

    units: tuple[DescribedUnit, ...]
    parameters: tuple[DescribedParameter, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole model; tied parameters count once."""
        return sum(math.prod(each.shape) for each in self.parameters)

    @property
    def bytes(self) -> int:
        """Bytes of the parameters that this rank holds, without padding."""
        return sum(each.bytes for each in self.parameters)

    @property
    def full_bytes(self) -> int:
        """Bytes of the parameters of the whole model, in the dtypes in which they rest."""
        return sum(each.full_bytes for each in self.parameters)

    def __str__(self) -> str:
        heads = ("unit", "parameter", "global shape", "dtype", "here", "bytes here")
        rows: list[tuple[object, ...]] = [heads]
        for each in self.parameters:
            name = each.names[0] + "".join(f" = {other}" for other in each.names[1:])
            dtype = each.dtype if each.trainable else f"{each.dtype}, frozen"
            shape = " x ".join(map(str, each.shape)) or "scalar"
            held = f"[{each.span.start}, {each.span.stop})" if each.span.numel else "none"
            if each.span.numel == math.prod(each.shape):
                held = "all"
            rows.append((each.unit or "(not sharded)", name, shape, dtype, held, each.bytes))
        tables = [in_columns(rows, right=(5,))]
        if self.units:
            sizes_of_it = ("bytes here", "padding", "full")
            rows = [("unit", "slices", "replicas", *sizes_of_it, "computes in", "rests on")]
            for unit in self.units:
                sizes = (unit.shard_bytes, unit.padding_bytes, unit.full_bytes)
                dtypes = ", ".join(unit.compute_dtypes)
                rows.append((unit.name, unit.slices, unit.replicas, *sizes, dtypes, unit.rests_on))
            tables.append(in_columns(rows, right=(1, 2, 3, 4, 5)))
        padding = sum(unit.padding_bytes for unit in self.units)
        tables.append(
            f"{self.numel:,} elements, {bytes_text(self.full_bytes)}; this rank holds "
            f"{bytes_text(self.bytes)} and {bytes_text(padding)} of padding."
        )
        return "\n\n".join(tables)


def describe(model: nn.Module) -> Description:
    """List the parameters of ``model``: the unit of each, and the elements that this rank holds.

    Works for models behind either interface, for parts of them, and for plain models. Not
    collective: each rank describes itself. Call it between steps.

    Raises:
        UsageError: while modules show full parameters (in a forward, or `summon_full_params`).
    """
    units = named_units(model)
    owners = {id(param): each.name for each in units for param in each.unit.sharded}
    for each in units:
        if not all(isinstance(shown, ShardedParameter) for shown in each.unit.shards.shown()):
            raise UsageError(
                f"unit {each.name!r} shows its full parameters; describe the model between steps "
                "and outside of summon_full_params"
            )
    names: dict[int, list[str]] = {}
    params: dict[int, Tensor] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(clean_name(name))
        params[id(param)] = param
    return Description(
        tuple(map(_described_unit, units)),
        tuple(
            _described(owners.get(key), tuple(dict.fromkeys(names[key])), param)
            for key, param in params.items()
        ),
    )


def _described(unit: str | None, names: tuple[str, ...], param: Tensor) -> DescribedParameter:
    return DescribedParameter(
        unit,
        names,
        tuple(param.shape),
        dtype_name(param.dtype),
        param.requires_grad,
        param.span if isinstance(param, ShardedParameter) else Span(0, param.numel()),
        param.local.nbytes if isinstance(param, ShardedParameter) else param.nbytes,
        param.numel() * param.element_size(),
    )


def _described_unit(each: NamedUnit) -> DescribedUnit:
    unit = each.unit
    held = sum(param.local.nbytes for param in unit.sharded)
    return DescribedUnit(
        each.name,
        unit.ranks.gather.size,
        unit.ranks.replicas.size,
        unit.layout.shard_bytes,
        unit.layout.shard_bytes - held,
        unit.layout.full_bytes,
        tuple(dict.fromkeys(segment.full_dtype for segment in unit.layout.segments)),
        unit.shards.device.type,
    )
