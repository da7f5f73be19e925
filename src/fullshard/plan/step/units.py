# SPDX-License-Identifier: Apache-2.0
"""The units that the engine would make of a model, with their layouts, policies and prices."""

from dataclasses import dataclass, replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.forecast import UnitCost, unit_cost
from fullshard.core.grouping import around_of, deepest_around, group_parameters
from fullshard.core.layout import Layout, lay_out, stored_bytes
from fullshard.core.schedule import UnitPolicy, unit_policy
from fullshard.core.spec import ParamSpec, item_bytes
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.operations import Model
from fullshard.plan.run import Run, Wrap


@dataclass(frozen=True)
class PlannedUnit:
    """One unit: the path of its module ("" is the root), and the number of the unit around it.

    ``dealt_out`` are experts of which others have others.
    """

    path: str
    around: int | None
    layout: Layout
    policy: UnitPolicy
    cost: UnitCost
    dealt_out: bool = False

    @property
    def params(self) -> tuple[ParamSpec, ...]:
        """Its parameters, in the order of the layout."""
        return tuple(slot.spec for _, slot in self.layout)


def shards_and_replicas(run: Run, cluster: Cluster) -> tuple[int, int]:
    """Ranks that share a unit's slices, and how many such groups there are.

    Raises `ConfigurationError` if the world does not match the mesh.
    """
    world, rest = divmod(cluster.devices, run.tensor_parallel)
    if rest:
        raise ConfigurationError(
            f"{cluster.devices} devices cannot be cut into groups of {run.tensor_parallel} for "
            "tensor parallelism"
        )
    if not run.strategy.sharding.sharded:
        return 1, world
    if world % run.replicas:
        near = [each for each in range(1, world + 1) if world % each == 0]
        nearest = min(near, key=lambda each: abs(each - run.replicas))
        raise ConfigurationError(
            f"{world} ranks cannot be {run.replicas} equal replicas; the nearest that divides "
            f"is {nearest}"
        )
    return world // run.replicas, run.replicas


def _sharing_experts(model: Model, run: Run, shards: int, replicas: int) -> tuple[int, int]:
    """Ranks that share the same experts in slices, and how many such groups have the same slice.

    The ranks that experts are dealt out over are next to each other, in one group of ``shards``, or
    of all replicas where nothing is in shards.
    """
    degree = run.expert_parallel
    if not model.experts:
        raise ConfigurationError(f"{model.name} has no stacked experts to deal out over {degree}")
    among = shards if run.strategy.sharding.sharded else replicas
    if among % degree:
        raise ConfigurationError(
            f"experts cannot be dealt out over {degree} of {among} ranks: choose a divisor"
        )
    if run.strategy.sharding.sharded:
        return shards // degree, replicas
    return 1, replicas // degree


def unit_paths(model: Model, wrap: Wrap) -> tuple[str, ...]:
    """The paths of the modules that become units, the root's first, in order of execution."""
    if wrap is Wrap.NONE:
        return ("",)
    if wrap is Wrap.BLOCK:
        return ("", *model.blocks)
    if wrap is Wrap.PART:
        return ("", *model.parts)
    blocks = set(model.blocks)
    inside = tuple(each + "." for each in blocks)
    ends = [each for each in model.parts if each not in blocks and not each.startswith(inside)]
    order = {each: number for number, each in enumerate(model.parts)}

    def place(path: str) -> int:
        below = (order[each] for each in model.parts if each == path or each.startswith(path + "."))
        return min(below, default=0)

    return ("", *sorted([*model.blocks, *ends], key=place))


def units_of(
    model: Model, run: Run, cluster: Cluster, *, reduces: bool = True
) -> tuple[PlannedUnit, ...]:
    """The units in the order of their modules, as the engine numbers them.

    With ``reduces`` false they are treated as in a micro-batch whose gradients stay full.
    """
    paths = unit_paths(model, run.wrap)
    whole = shards_and_replicas(run, cluster)
    dealt_out = model.experts if run.expert_parallel > 1 else ()
    sharing = whole
    if run.expert_parallel > 1:
        sharing = _sharing_experts(model, run, *whole)
        below: dict[str | None, list[str]] = {}
        for each in dealt_out:
            below.setdefault(deepest_around(each, paths), []).append(each)
        paths = tuple(each for path in paths for each in (path, *below.get(path, ())))
    groups = group_parameters(model.spec(run), paths)
    reshards = run.strategy.sharding.reshard_after_forward
    units: list[PlannedUnit] = []
    for path, around in zip(paths, around_of(paths), strict=True):
        shards, replicas = sharing if path in dealt_out else whole
        params = groups[path]
        if path in dealt_out and run.align == "row":
            params = tuple(_cut(each, shards) for each in params)
        layout = lay_out(params, shards, run.precision, run.align)
        resident = not layout.segments or _shard_is_full(layout, run)
        policy = unit_policy(
            layout,
            root=path == "",
            resident=resident,
            reduced=reduces and any(segment.trainable for segment in layout.segments),
            reshard_after_forward=None if reshards else False,  # the root's own is left out
            replicas=replicas,
            on_cpu=cluster.device.cpu,
        )
        cost = _cost(layout, run, replicas, cluster, resident=resident)
        units.append(PlannedUnit(path, around, layout, policy, cost, path in dealt_out))
    return tuple(units)


def _cut(param: ParamSpec, sharing: int) -> ParamSpec:
    """Cut stacked experts along the first dimension that slices of whole rows divide evenly."""
    even = (dim for dim, size in enumerate(param.shape) if size % sharing == 0)
    return replace(param, cut_dim=next(even, 0))


def _shard_is_full(layout: Layout, run: Run) -> bool:
    """True if the one slice there is can be computed with as it rests."""
    converted = any(segment.full_dtype != segment.dtype for segment in layout.segments)
    return layout.shards == 1 and not converted and not run.offload.to_host


def _cost(layout: Layout, run: Run, replicas: int, cluster: Cluster, *, resident: bool) -> UnitCost:
    shards, scratch = layout.shards, 0
    trained = [each for each in layout.segments if each.trainable]
    if cluster.device.cpu and shards > 1:  # on Gloo, ranks exchange slices and add them up
        scratch = sum(
            each.full_numel * item_bytes(each.grad_dtype) * (shards - 1) // shards
            for each in trained
        )
    rests = None
    if run.precision.keep_low_grads:
        rests = sum(stored_bytes(each.slice_numel, each.grad_dtype) for each in trained)
    return unit_cost(
        layout, replicas=replicas, resident=resident, scratch_bytes=scratch, rest_bytes=rests
    )
