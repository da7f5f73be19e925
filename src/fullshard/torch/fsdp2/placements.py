# SPDX-License-Identifier: Apache-2.0
"""Dims of meshes that ``fully_shard`` is given, and places that parameters are to have of them.

[Note: Parameters on other ranks]
PyTorch lets ``shard_placement_fn`` give a parameter a mesh of its own, beside the dimension, as for
experts inside a block. A unit has one group of ranks here, so the modules that hold such parameters
become a unit of their own, gathered when the first of them runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch.comm.ranks import Where
from fullshard.torch.sharding.options import DataParallelMeshDims
from fullshard.torch.sharding.owners import AlignOrMatrix
from fullshard.torch.sharding.shard import ToShard
from fullshard.torch.unit.sites import ParamSites
from fullshard.torch.unit.unit import owner_of

Choice = Callable[[nn.Parameter], Any]
"""``Shard(d)``, None, or an object with ``placement`` (one of these) and ``mesh_info``."""

_Ranks = tuple[tuple[int, ...], ...]


def chosen_dims(mesh: Where, dims: DataParallelMeshDims | None) -> Where:
    """The 1-D or 2-D mesh that ``dims`` picks out of a larger one."""
    if dims is None:
        return mesh
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        raise ConfigurationError("dp_mesh_dims needs a DeviceMesh with names as mesh")
    axes = []
    for names in (dims.replicate_names, dims.shard_names):
        if unknown := set(names) - set(mesh.mesh_dim_names):
            raise ConfigurationError(f"dp_mesh_dims names {sorted(unknown)}, not dims of {mesh}")
        if names:
            axis = mesh[names]
            axes.append(axis if len(names) == 1 else axis._flatten("_".join(names)))
    if not dims.shard_names:
        raise NotSupportedError(
            "dp_mesh_dims without shard replicates everything: use FullyShardedDataParallel with "
            "NO_SHARD for that"
        )
    if len(axes) == 1:
        return axes[0]
    return axes[1].get_group(), axes[0].get_group()


def placement_of(chosen: Choice, param: nn.Parameter) -> Any:
    """Return the placement of ``param`` alone."""
    wanted = chosen(param)
    return getattr(wanted, "placement", wanted)


def by_mesh(
    modules: Sequence[nn.Module],
    chosen: Choice | None,
    where: Where,
    ignored: AbstractSet[nn.Parameter],
) -> tuple[Where, list[list[nn.Module]]]:
    """Return the ranks for ``modules``, and what is inside of them for others, by these.

    See [Note: Parameters on other ranks]. Raises `NotSupportedError` if parameters of one module
    are for several meshes.
    """
    if chosen is None:
        return where, []
    params = dict.fromkeys(param for module in modules for param in module.parameters())
    free = [param for param in params if param not in ignored and owner_of(param) is None]
    infos = [getattr(chosen(param), "mesh_info", None) for param in free]
    if not any(infos):
        return where, []
    wheres = [where if info is None else _where(info) for info in infos]
    wanted = {param: _ranks(theirs) for param, theirs in zip(free, wheres, strict=True)}
    meshes = dict(zip(wanted.values(), wheres, strict=True))
    if len(meshes) == 1:
        return wheres[0], []
    apart: dict[_Ranks, list[nn.Module]] = {}
    for module in modules:
        for ranks, part in _parts(module, wanted, _ranks(where)):
            apart.setdefault(ranks, []).append(part)
    return where, list(apart.values())


def _parts(
    module: nn.Module, wanted: Mapping[nn.Parameter, _Ranks], usual: _Ranks
) -> Iterator[tuple[_Ranks, nn.Module]]:
    """Yield the outermost modules below whose parameters are all for other ranks than ``usual``."""
    for name, param in module.named_parameters(recurse=False):
        if wanted.get(param, usual) != usual:
            raise NotSupportedError(
                f"shard_placement_fn gives {name!r} of {type(module).__name__} another mesh than "
                "other parameters in it or below; a unit is gathered over one: put what goes "
                "together into a module of its own"
            )
    for child in module.children():
        inside = {wanted[param] for param in child.parameters() if param in wanted}
        if len(inside - {usual}) == len(inside) == 1 and has_forward(child):
            yield inside.pop(), child
        elif inside - {usual}:
            yield from _parts(child, wanted, usual)


def has_forward(module: nn.Module) -> bool:
    """Return False for containers, which nobody calls, unless their class defines a forward."""
    containers = (nn.ModuleList, nn.ModuleDict)
    return not isinstance(module, containers) or type(module).forward is not nn.Module.forward


def _where(info: Any) -> Where:
    """Return the ranks that a ``mesh_info`` stands for."""
    mesh: DeviceMesh = info.mesh
    if info.replicate_mesh_dim is None:
        return mesh if mesh.ndim == 1 else mesh.get_group(info.shard_mesh_dim)
    return mesh.get_group(info.shard_mesh_dim), mesh.get_group(info.replicate_mesh_dim)


def _ranks(where: Where) -> _Ranks:
    """Return the global ranks that share slices, and those with equal ones, if that is asked."""
    if isinstance(where, DeviceMesh):
        groups: list[Any] = [where.get_group(dim) for dim in reversed(range(where.ndim))]
    else:
        groups = list(where) if isinstance(where, tuple) else [where]
    return tuple(
        tuple(dist.get_process_group_ranks(group))
        if group is None or isinstance(group, dist.ProcessGroup)
        else (id(group),)  # ranks that are threads
        for group in groups
    )


def cut_along(found: ToShard, chosen: Choice, slices: int, align: AlignOrMatrix) -> ToShard:
    """Note along which dimension each parameter is to be cut."""

    def cut(each: ParamSites) -> ParamSites:
        wanted = placement_of(chosen, each.param)
        if wanted is None or wanted == Shard(0):
            return each
        name, shape = each.spec.name, each.spec.shape
        if not isinstance(wanted, Shard) or not -len(shape) <= wanted.dim < len(shape):
            raise ConfigurationError(
                f"shard_placement_fn gives {wanted} for parameter {name!r} of shape {shape}; it "
                "must give Shard(d) with one of its dimensions, or None"
            )
        dim = wanted.dim % len(shape)
        if align == "element" and dim:
            raise NotSupportedError(
                f'shard_placement_fn asks for {wanted} of parameter {name!r}, and align="element" '
                'cuts everything where it happens to be; leave align="row"'
            )
        if dim and shape[dim] % slices:
            raise NotSupportedError(
                f"shard_placement_fn asks for {wanted} of parameter {name!r}: its {shape[dim]} "
                f"parts cannot be dealt out evenly to {slices} ranks; only Shard(0) may be uneven"
            )
        return replace(each, spec=replace(each.spec, cut_dim=dim))

    tied = [replace(each, everywhere=cut(each.everywhere)) for each in found.tied]
    return replace(found, params=[cut(each) for each in found.params], tied=tied)
