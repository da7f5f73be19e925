# SPDX-License-Identifier: Apache-2.0
"""The interface of FSDP2: a function that shards modules in place, bottom-up."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.core.strategy import Sharding
from fullshard.torch.comm.compressed import CommunicationCompression, check_compression
from fullshard.torch.comm.ranks import Ranks, Where, compressed, in_blocks, ranks_of
from fullshard.torch.fsdp2.module import FSDPModule
from fullshard.torch.fsdp2.placements import (
    by_mesh,
    chosen_dims,
    cut_along,
    has_forward,
    placement_of,
)
from fullshard.torch.sharding.find import ignored_parts
from fullshard.torch.sharding.module_buffers import move_buffers
from fullshard.torch.sharding.options import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    check_align,
    offload_of,
    precision_of,
)
from fullshard.torch.sharding.owners import (
    AlignOrMatrix,
    WholeMatrices,
    is_matrix,
    matrices_owned,
    tables_of,
)
from fullshard.torch.sharding.settings import mark_optional
from fullshard.torch.sharding.shard import ToShard, agree, shard_modules, shardable_parameters
from fullshard.torch.state.forms import StateForm, change_form
from fullshard.torch.state.weights_file import Entries
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.sites import ParamSites

_sharded_classes: dict[type[nn.Module], type[nn.Module]] = {}


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: Where = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    compression: CommunicationCompression | None = ...,
    check_values: bool = ...,
    align: AlignOrMatrix | WholeMatrices = ...,
    optional: bool = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: Where = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    compression: CommunicationCompression | None = ...,
    check_values: bool = ...,
    align: AlignOrMatrix | WholeMatrices = ...,
    optional: bool = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: Where = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 - it has no fields
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    compression: CommunicationCompression | None = None,
    check_values: bool = True,
    align: AlignOrMatrix | WholeMatrices = "row",
    optional: bool = False,
) -> Any:
    """Shard the parameters of ``module`` that are not sharded yet, in place, as one unit.

    Call it bottom-up: first on the blocks, then on the root, which takes what is left. Of a list of
    modules the parameters form one unit, gathered when the first of them runs. Collective over the
    ranks of ``mesh``; every rank must hold the same values.

    Args:
        module: the module or modules; their parameters must be on one device.
        mesh: a 1-D ``DeviceMesh`` (or a process group); None is the default group. A 2-D mesh
            (replicate, shard), or a pair of groups (shard, replicate), is hybrid sharding.
        reshard_after_forward: drop full parameters between forward and backward. None: yes, but not
            for the root, whose parameters backward needs at once. A number: keep this rank's part
            of what so many neighbouring ranks hold together, so that backward gathers from them
            alone (1 is False, all ranks are True); it must divide the ranks that share slices.
        shard_placement_fn: gives ``Shard(d)`` for a parameter that is to be cut along dimension d,
            None for ``Shard(0)``, or with ``align="matrix"`` for a matrix that is not to be cut.
            Along another dimension than the first, parts must be equal. PyTorch's
            ``ShardPlacementResult`` names a mesh, too: modules whose parameters are for another one
            than ``mesh`` become a unit of their own over that.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: see `CPUOffloadPolicy`.
        ignored_params: parameters that stay as they are on every rank, their gradients unreduced.
        dp_mesh_dims: which dims of a larger ``mesh`` to shard and to replicate over.
        compression: see `CommunicationCompression`; not part of FSDP2.
        check_values: compare the values that ranks start with. Not part of FSDP2.
        align: cut parameters at rows, so that they are DTensors, or ("element") anywhere, so that
            slices are equal and a unit is one message, or ("matrix") leave each matrix on one rank,
            for optimizers like Muon. Embeddings, and what is no matrix, are then cut at rows.
            `WholeMatrices` does that for several units together. Not part of FSDP2.
        optional: let ranks leave the unit, and those inside, out of a forward, as `mark_optional`
            does. Not part of FSDP2.

    Parameters on the meta device stay there until ``to_empty`` or
    ``load_state_dict(assign=True)``; what is not initialised by the first forward is found then.

    Returns:
        ``module``; its class is now a subclass of its own class and of `FSDPModule`.

    Raises:
        ConfigurationError: if parameters are on several devices, ``mesh`` is not a DeviceMesh,
            ``align`` or a placement is none, or ranks start with different values.
        NotSupportedError: for a placement that does not divide a dimension, with
            ``align="element"`` another than ``Shard(0)``, with ``align="matrix"`` a number for
            ``reshard_after_forward``, or if one module's parameters are for several meshes.
        UsageError: if there is no process group, or a module is sharded already.
    """
    precision = precision_of("mp_policy", mp_policy)
    offload = offload_of("offload_policy", offload_policy)
    together = align if isinstance(align, WholeMatrices) else None
    align = "matrix" if isinstance(align, WholeMatrices) else align
    check_align(align)
    check_compression(compression)
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_modules(modules)
    _, ignored = ignored_parts({"ignored_params": ignored_params})
    where, apart = by_mesh(modules, shard_placement_fn, chosen_dims(mesh, dp_mesh_dims), ignored)
    for parts in apart:
        fully_shard(
            parts,
            reshard_after_forward=reshard_after_forward is not False,
            shard_placement_fn=shard_placement_fn,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            ignored_params=ignored_params,
            compression=compression,
            check_values=check_values,
            align=align,
        )
    found = shardable_parameters(modules, where, ignored)
    hybrid = isinstance(where, tuple) or (isinstance(where, DeviceMesh) and where.ndim == 2)
    ranks = ranks_of(where, Sharding(True, True, replicated=hybrid))
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        ranks, reshard_after_forward = _in_blocks(ranks, reshard_after_forward)
    ranks = compressed(ranks, compression)
    if shard_placement_fn is not None:
        found = cut_along(found, shard_placement_fn, ranks.gather.size, align)
    if align == "matrix":
        found, align = _owned(found, modules, ranks, shard_placement_fn, together), "row"
    plan = Plan(ranks, found.device, reshard_after_forward, precision, offload, align=align)
    units = {type(modules[0]).__name__: found.all_of_them}
    bare = agree(units, [plan], check_values=check_values, meta_on_some=True)
    plan = replace(plan, bare_somewhere=bare, mp_policy=mp_policy)
    params = found.claim()
    for each in modules:
        move_buffers(each, found.device)
        _mark(each)
    managed = shard_modules(modules, params, plan)
    managed.parts = [unit for parts in apart if (unit := managed_unit_of(parts[0]))]
    if optional:
        mark_optional(*modules)
    return module


def _in_blocks(ranks: Ranks, size: Any) -> tuple[Ranks, bool]:
    if not isinstance(size, int):
        raise ConfigurationError(
            f"reshard_after_forward must be True, False, None or a number of ranks, got {size!r}"
        )
    blocks = in_blocks(ranks, size)
    if size in (1, ranks.gather.size):
        return ranks, size != 1
    return blocks, True


def _owned(
    found: ToShard,
    modules: Sequence[nn.Module],
    ranks: Ranks,
    wanted: Callable[[nn.Parameter], Any] | None,
    together: WholeMatrices | None,
) -> ToShard:
    """Give matrices to ranks, but those for which the user has chosen a placement."""
    tables = set().union(*(tables_of(module) for module in modules))

    def whole(each: ParamSites) -> bool:
        chosen = wanted is not None and placement_of(wanted, each.param) is not None
        return is_matrix(each, tables) and not chosen

    (owned,) = matrices_owned([(found.all_of_them, ranks)], whole, together)
    params, tied = owned[: len(found.params)], owned[len(found.params) :]
    moved = [
        replace(before, everywhere=each) for before, each in zip(found.tied, tied, strict=True)
    ]
    return replace(found, params=params, tied=moved)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ConfigurationError("fully_shard needs at least one module, got an empty list")
    for each in modules:
        if not isinstance(each, nn.Module) or not has_forward(each):
            raise ConfigurationError(
                "fully_shard needs modules that have a forward, got "
                f"{type(each).__name__}; shard the modules inside it"
            )
        if managed_unit_of(each) is not None:
            raise UsageError(f"this {type(each).__name__} is sharded already")


def _mark(module: nn.Module) -> None:
    """Make ``module`` an `FSDPModule`, which torch's ``replicate`` and its like leave alone."""
    module.__class__ = _sharded_class(type(module))
    applied = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    applied[fully_shard.__name__] = RegistryItem()


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _sharded_classes:
        # Libraries look at which module a class is from to tell their own models from others.
        members = {"__module__": cls.__module__}
        base = SavesPretrained if hasattr(cls, "save_pretrained") else FSDPModule
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (base, cls), members)
    return _sharded_classes[cls]


_INSTEAD = "call it on every rank: rank 0 alone writes, or pass state_dict= to call it there alone"


class SavesPretrained(FSDPModule):
    """The base of the classes that `fully_shard` makes of classes that have ``save_pretrained``."""

    def save_pretrained(self, *args: Any, **options: Any) -> Any:
        """Write the plain model's files, as the module's own class does. Collective.

        Weights are gathered unit by unit into rank 0's host memory. It writes; the others wait.
        With ``state_dict``, or on models that transformers itself has sharded, this is the own
        class's method alone.

        Raises:
            ConfigurationError: on all ranks, if rank 0 cannot write, or there is a parameter on
                the meta device.
            UsageError: called on some ranks only, see `fullshard.torch.comm.watch.roll_call`.
        """
        own = super().save_pretrained  # type: ignore[misc]  # the module's own class has it
        call = inspect.signature(own).bind(*args, **options)
        theirs = getattr(getattr(self, "config", None), "distributed_config", None)
        given_state = {**call.arguments, **call.kwargs}.get("state_dict")
        if given_state is not None or theirs is not None or options.get("distributed_checkpoint"):
            return own(*args, **options)
        entries = Entries(self)
        entries.call_roll("save_pretrained()", _INSTEAD)
        form = StateForm(StateDictType.FULL_STATE_DICT, on_host=True, kept=entries.first)
        change_form(entries.values, form, "save_pretrained()", _INSTEAD)
        call.arguments.pop("state_dict", None)
        with entries.together("could not save the model"):
            if entries.first:
                if not getattr(self, "should_save_on_this_rank", bool)(True):
                    raise UsageError("the model's ranks are without the job's rank 0, which writes")
                own(*call.args, **{**call.kwargs, "state_dict": entries.values})
        return None
