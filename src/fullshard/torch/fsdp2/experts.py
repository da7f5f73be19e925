# SPDX-License-Identifier: Apache-2.0
"""Experts on an axis of their own: dealt out over one dim of a mesh, in shards over the others."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.func import functional_call

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch.fsdp2.fully_shard import fully_shard
from fullshard.torch.sharding.owners import WholeMatrices
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.tensor.tensor_parallel import held_here


class StackedExperts(nn.Module):
    """Experts of one kind as one module: parameters stacked along a new first dimension.

    ``each`` has the structure and the names of one expert, and everybody's parameters. It is made
    of plain modules, which stay as they are.

    Raises:
        ConfigurationError: there are no experts, or they differ in class or in their parameters.
        NotSupportedError: experts have buffers, which would be no longer their own.
    """

    def __init__(self, experts: Sequence[nn.Module]):
        super().__init__()
        _check_alike(experts)
        self.count: int = len(experts)
        self.each: nn.Module = deepcopy(experts[0])
        for name, param in list(self.each.named_parameters()):
            path, _, leaf = name.rpartition(".")
            stacked = torch.stack([expert.get_parameter(name).detach() for expert in experts])
            owner = self.each.get_submodule(path)
            setattr(owner, leaf, nn.Parameter(stacked, requires_grad=param.requires_grad))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run each expert of this rank on its part of ``rows`` (n, ...), one after the other.

        ``counts``, whole numbers (experts of this rank,), says how many rows belong to each.
        """
        here = {
            name: param.to_local() if isinstance(param, DTensor) else param
            for name, param in self.each.named_parameters()
        }
        results = [
            functional_call(self.each, {name: part[expert] for name, part in here.items()}, (own,))
            for expert, own in enumerate(rows.split_with_sizes(counts.tolist()))
        ]
        return torch.cat(results)


def _check_alike(experts: Sequence[nn.Module]) -> None:
    if not experts:
        raise ConfigurationError("expected experts, got an empty list")

    def kind(expert: nn.Module) -> tuple[object, ...]:
        params = [(n, p.shape, p.dtype, p.requires_grad) for n, p in expert.named_parameters()]
        return type(expert), params

    for number, expert in enumerate(experts):
        if next(expert.buffers(), None) is not None:
            raise NotSupportedError(
                f"expert {number} has buffers, which experts of one stack would share: keep them "
                "outside of the experts"
            )
        if kind(expert) != kind(experts[0]):
            raise ConfigurationError(
                f"experts 0 and {number} differ in their class, or in the name, shape, dtype or "
                "requires_grad of a parameter: only experts of one kind can be stacked"
            )


def shard_experts(
    module: nn.Module, *, mesh: DeviceMesh, experts: str, **options: Any
) -> nn.Module:
    """Deal experts out over the dim ``experts`` of ``mesh``, and shard them over its other dims.

    ``module`` has stacked parameters, whose first dimension is the experts', or is a ``ModuleList``
    of experts of one kind, from which a `StackedExperts` is made. It becomes one unit; call this
    before the modules around it are sharded, over all ranks of ``mesh``. In forward a parameter is
    a DTensor on ``mesh[experts]``, whose ``to_local()`` are this rank's experts, full. Which tokens
    come to them is up to the model (``all_to_all_single_autograd``). Gradients are means over all
    ranks of ``mesh``, whose tokens all reach every expert. Collective over ``mesh``.

    Args:
        module: the experts, plain, alike on all ranks.
        mesh: all ranks that the modules around the experts are sharded over, with named dims:
            ``experts``, and one over which ranks that have the same experts share them in slices
            (or two, replicate and shard, for hybrid sharding). Then those of tensor parallelism:
            dims over which parameters are DTensors already, and not cut by experts. A parameter is
            then a DTensor over these and ``experts``.
        experts: the name of the dim over which experts are dealt out.
        options: those of `fully_shard`. Where ranks that share experts are not a divisor of how
            many a rank has, each is cut along the first of its own dimensions that they do divide,
            unless ``shard_placement_fn`` says otherwise. With ``align="matrix"`` (or
            `WholeMatrices`) one of these ranks has all matrices of a stack, whole.

    Returns:
        ``module``, or the `StackedExperts`, to be put in the list's place.

    Raises:
        ConfigurationError: ``mesh`` has no such dim or no other, parameters disagree on how many
            experts there are, or the ranks cannot have equally many of them; in the first forward,
            if what is around them is sharded over other ranks than ``mesh``.
        NotSupportedError: a parameter is a DTensor over another mesh, or cut by experts, or is in
            a list and an ignored one, or a DTensor.
    """
    ignored = set(options.get("ignored_params") or ())
    if isinstance(module, nn.ModuleList):
        _check_list(module, ignored)
    cut = _tensor_dims(module, ignored, mesh, experts)
    others = _other_dims(mesh, experts, cut)
    stacked = StackedExperts(list(module)) if isinstance(module, nn.ModuleList) else module
    here = _check_dealt_out(stacked, ignored, mesh, experts)
    sharing = mesh[others[-1]].size()
    if isinstance(options.get("align"), WholeMatrices):  # which are of other ranks, all together
        options["align"] = "matrix"
    if options.get("align", "row") == "row":
        options.setdefault("shard_placement_fn", lambda param: _cut(param, here, sharing))
    sites = [
        (part, name, param)
        for part in stacked.modules()
        for name, param in part.named_parameters(recurse=False, remove_duplicate=False)
        if param not in ignored
    ]
    dealt_out = {param: _dealt_out(param, mesh, experts) for _, _, param in sites}
    try:
        for part, name, param in sites:
            setattr(part, name, dealt_out[param])
        fully_shard(stacked, mesh=mesh[others], **options)
    except BaseException:
        for part, name, param in sites:
            setattr(part, name, param)
        raise
    managed = managed_unit_of(stacked)
    assert managed is not None
    receiving = mesh[tuple(name for name in mesh.mesh_dim_names or () if name not in cut)]
    managed.unit.settings.sources = frozenset(receiving.mesh.flatten().tolist())
    return stacked


def _check_list(experts: nn.ModuleList, ignored: set[nn.Parameter]) -> None:
    if not ignored.isdisjoint(experts.parameters()):
        raise NotSupportedError(
            "ignored_params names parameters of experts in a list, which are stacked: freeze them "
            "instead, or keep them in a module beside the experts"
        )
    if any(isinstance(param, DTensor) for param in experts.parameters()):
        raise NotSupportedError(
            "parameters of experts in a list are DTensors, which StackedExperts cannot stack: "
            "write the experts as one module with stacked parameters, and parallelise that"
        )


def _dims_of(param: Tensor) -> tuple[str, ...]:
    """The names of the dims of the mesh that ``param`` is a DTensor over."""
    return (param.device_mesh.mesh_dim_names or ()) if isinstance(param, DTensor) else ()


def _tensor_dims(
    module: nn.Module, ignored: set[nn.Parameter], mesh: DeviceMesh, experts: str
) -> set[str]:
    """The names of the dims of ``mesh`` over which parameters of ``module`` are DTensors."""
    found: set[str] = set()
    for name, param in module.named_parameters():
        if param in ignored or not isinstance(param, DTensor):
            continue
        dims, named = _dims_of(param), getattr(mesh, "mesh_dim_names", None) or ()
        known = set(dims) <= set(named) - {experts}
        if not dims or not known or param.device_mesh != mesh[dims]:
            raise NotSupportedError(
                f"parameter {name!r} is a DTensor already, over dims {dims} of {param.device_mesh};"
                f" shard_experts takes plain ones, and DTensors over other dims than {experts!r} "
                "of the mesh that it is given: call it before anything else shards them"
            )
        if any(placement.is_shard(0) or placement.is_partial() for placement in param.placements):
            raise NotSupportedError(
                f"parameter {name!r} is placed as {param.placements} over {dims}, which cuts "
                "experts; tensor parallelism must cut the dimensions behind the first one"
            )
        found.update(dims)
    return found


def _other_dims(mesh: DeviceMesh, experts: str, cut: set[str]) -> tuple[str, ...]:
    """The dims of ``mesh`` but ``experts`` and those that parameters are ``cut`` over already."""
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    others = tuple(name for name in names or () if name != experts and name not in cut)
    if not names or experts not in names or len(others) not in (1, 2):
        raise ConfigurationError(
            f"shard_experts needs a DeviceMesh with a dim named {experts!r} and one or two more, "
            f'such as init_device_mesh("cuda", (2, 4), mesh_dim_names=("shard", {experts!r})), '
            f"beside those that parameters are DTensors over ({', '.join(sorted(cut)) or 'none'}); "
            f"got {mesh}"
        )
    return others


def _check_dealt_out(
    module: nn.Module, ignored: set[nn.Parameter], mesh: DeviceMesh, dim: str
) -> int:
    """Return how many experts of ``module`` each of the ranks of ``dim`` gets; all equally many."""
    counts: dict[int, str] = {}
    ranks = mesh[dim]
    for name, param in module.named_parameters():
        if param in ignored:
            continue
        counts.setdefault(param.shape[0] if param.dim() else 0, name)
    if len(counts) != 1:
        told = ", ".join(f"{name!r} has {count}" for count, name in counts.items())
        raise ConfigurationError(
            "the first dimension of parameters must be that of the experts: "
            f"{told or 'there are no parameters'}; keep others (a router) in a module beside it"
        )
    (count,) = counts
    if not count or count % ranks.size():
        raise ConfigurationError(
            f"{count} experts cannot be dealt out over the {ranks.size()} ranks of mesh dim "
            f"{dim!r}: choose a dim that divides them, or "
            f"{(count // ranks.size() + 1) * ranks.size()} experts"
        )
    return count // ranks.size()


def _dealt_out(param: nn.Parameter, mesh: DeviceMesh, experts: str) -> nn.Parameter:
    """This rank's experts of ``param``, as a DTensor over ``experts`` and what cut it before."""
    held = held_here(param).detach()
    placed: dict[str, Placement] = {experts: Shard(0)}
    if isinstance(param, DTensor):
        placed |= dict(zip(_dims_of(param), param.placements, strict=True))
    dims = tuple(name for name in mesh.mesh_dim_names or () if name in placed)
    part = held.chunk(mesh[experts].size())[mesh.get_local_rank(experts)].clone()
    dealt = DTensor.from_local(
        part,
        mesh[dims],
        [placed[name] for name in dims],
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    new = nn.Parameter(dealt, requires_grad=param.requires_grad)
    new.__dict__.update(param.__dict__)
    return new


def _cut(param: Tensor, here: int, sharing: int) -> Shard | None:
    if here % sharing:
        for dim, size in enumerate(held_here(param).shape):
            if dim and size % sharing == 0:
                return Shard(dim)
    return None
