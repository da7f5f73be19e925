# SPDX-License-Identifier: Apache-2.0
"""Changes of a unit between steps: parameters thawed, given up, cast, materialised or assigned."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.layout import lay_out_segments
from fullshard.core.spec import ParamSpec
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name, dtype_of
from fullshard.torch.unit.guards.replaced import mark_replaced, put_back
from fullshard.torch.unit.shards import Shards
from fullshard.torch.unit.sites import ParamSites, notes_on
from fullshard.torch.unit.unit import Unit, UnitState, owner_of, set_owner

LOW_PRECISION = (torch.bfloat16, torch.float16)


def gather_apart(unit: Unit, apart: bool) -> None:
    """Gather by a communicator apart from that of reduces, or by the same one."""
    unit.ranks = replace(unit.ranks, one_communicator=not apart)
    unit.plan = replace(unit.plan, ranks=unit.ranks)
    unit.full.gather_by(unit.ranks.gather_of_steps)


def follow_requires_grad(unit: Unit) -> bool:
    """Take up what users have changed by ``requires_grad_``; False if nothing. Collective.

    A parameter that is frozen now keeps its place and gets no gradient. One that was frozen when it
    was sharded gets into a segment, and so a full gradient buffer, with others like it; the spans
    of those that were trained before stay what they are, and so does their optimizer state.
    """
    if not unit.shards.toggled:
        return False
    if unit.state is UnitState.GRADS or unit.gradients.kept:
        raise UsageError(
            f"unit {unit.name!r}: requires_grad was changed while gradients are being accumulated "
            "without communication; change it between optimizer steps"
        )
    now = [param.requires_grad for param in unit.sharded]
    unit.shards.seen_trainable = now
    unit.full.mark_replaced()
    thawed = {
        each.spec.name
        for each, place, on in zip(unit.params, unit.shards.places, now, strict=True)
        if on and place.grad_number < 0
    }
    if thawed:
        _lay_out_anew(unit, lambda specs: _split(specs, thawed))
    else:
        unit.rest_in(unit.shards)
    return True


def _split(specs: list[ParamSpec], thawed: set[str]) -> list[list[ParamSpec]]:
    """Split a segment into what stays as it is and what is trained from now on."""
    stay = [spec for spec in specs if spec.name not in thawed]
    return [stay, [replace(spec, trainable=True) for spec in specs if spec.name in thawed]]


def give_up(unit: Unit, originals: Mapping[str, nn.Parameter]) -> None:
    """Leave parameters to another unit; ``originals`` get the values of now. Collective.

    ``originals`` are by name in the unit, and are what its modules show afterwards.
    """
    names = set(originals)
    gone = [
        (each, sharded)
        for each, sharded in zip(unit.params, unit.sharded, strict=True)
        if each.spec.name in names
    ]
    on_meta = unit.shards.device.type == "meta"
    full = _lay_out_anew(unit, lambda specs: [[s for s in specs if s.name not in names]])
    for each, sharded in gone:
        original = originals[each.spec.name]
        if not on_meta:
            original.data.copy_(full[each.spec.name])
        each.put(original)
        put_back(original)
        mark_replaced(sharded, each.spec.name)


def follow_conversion(
    units: Iterable[Unit], convert: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Keep ``units`` where and as `torch.nn.Module.to` and its like would ``convert`` parameters.

    Returns what is left to do, for all other tensors. Collective where dtypes change. Nothing is
    changed if a unit cannot be where it would be. Raises as `rest_on` does.
    """
    known = [unit for unit in units if unit.sharded and not unit.on_meta]
    probes = [
        {
            dtype: convert(torch.empty(0, dtype=dtype, device=unit.shards.device))
            for dtype in {param.dtype for param in unit.sharded}
        }
        for unit in known
    ]
    devices = [next(iter(each.values())).device for each in probes]
    for unit, device, probe in zip(known, devices, probes, strict=True):
        if device.type not in (unit.plan.resting_device.type, "cpu"):
            return convert
        if any(
            (there.dtype, there.device) != (d, unit.shards.device) for d, there in probe.items()
        ):
            _check_between_steps(unit, "converted")
    done = False
    for unit, device, probe in zip(known, devices, probes, strict=True):
        done |= rest_as(unit, {dtype: there.dtype for dtype, there in probe.items()})
        done |= rest_on(unit, device)
    return (lambda t: t if isinstance(t, ShardedParameter) else convert(t)) if done else convert


def rest_as(
    unit: Unit, dtypes: Mapping[torch.dtype, torch.dtype], *, trained_only: bool = False
) -> bool:
    """Keep parameters, and their gradients, in other ``dtypes``; False if they are. Collective.

    Parameters stay the same objects. Between steps. Raises as `rest_on` does.
    """

    def converted(spec: ParamSpec) -> ParamSpec:
        dtype = dtype_of(spec.dtype)
        stays = trained_only and not spec.trainable
        return spec if stays else replace(spec, dtype=dtype_name(dtypes.get(dtype, dtype)))

    if all(converted(each.spec) == each.spec for each in unit.params):
        return False
    _check_between_steps(unit, "converted")
    grads = [param.grad for param in unit.sharded]
    for param in unit.sharded:
        param.grad = None
    by_param = dict(zip(unit.sharded, grads, strict=True))
    _lay_out_anew(unit, lambda specs: [[converted(spec) for spec in specs]])
    for param, grad in by_param.items():
        if isinstance(grad, ShardedParameter):
            grad.hold(grad.local.to(param.dtype))
        param.grad = grad
    return True


def _check_between_steps(unit: Unit, what: str) -> None:
    waiting = unit.gradients.kept or unit.gradients.reducing
    if unit.on_meta or waiting or unit.state in (UnitState.GRADS, UnitState.FULL_WITH_GRADS):
        raise UsageError(
            f"unit {unit.name!r} cannot be {what} now: it is on the meta device, or holds "
            "gradients that are not reduced yet. Do it between steps"
        )
    if unit.is_full and not unit.resident:
        unit.free()


def rest_on(unit: Unit, device: torch.device) -> bool:
    """Keep shards and their gradients on ``device`` from now on; False if they are there already.

    That is the host or where they belong. Memory where they were is released, parameters stay the
    same objects. A unit whose shards are away cannot be gathered. Between steps. Raises
    `NotSupportedError` for other devices, `UsageError` on the meta device and while full gradients
    wait for their reduce.
    """
    home = unit.plan.resting_device
    if device.type == home.type:
        device = home
    if device == unit.shards.device:
        return False
    if device != home and device.type != "cpu":
        raise NotSupportedError(
            f"unit {unit.name!r} rests on {home}, and can be moved to the CPU and back, not to "
            f"{device}; choose the device when the model is sharded"
        )
    _check_between_steps(unit, f"moved to {device}")
    values = {each.spec.name: p for each, p in zip(unit.params, unit.sharded, strict=True)}
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    unit.rest_in(Shards(unit.params, unit.layout, plan, device, values))
    for grad in (param.grad for param in unit.sharded):
        if isinstance(grad, ShardedParameter):
            grad.local = grad.local.to(device)
    return True


def _lay_out_anew(
    unit: Unit,
    regroup: Callable[[list[ParamSpec]], list[list[ParamSpec]]],
    further: Sequence[tuple[ParamSites, Tensor]] = (),
    sites: Mapping[str, ParamSites] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Lay out anew by ``regroup``, per segment; return full values by name. Collective.

    ``further`` parameters, with values, get segments of their own; ``sites`` has those that are
    used elsewhere from now on, by name.
    """
    full = unit.full_views(unit.gather_values())
    values = {each.spec.name: view for each, view in zip(unit.params, full, strict=True)}
    known = {each.spec.name: p for each, p in zip(unit.params, unit.sharded, strict=True)}
    old = [[slot.spec for slot in segment.slots] for segment in unit.layout.segments]
    groups = [group for specs in old for group in regroup(specs) if group]
    specs = {spec.name: spec for group in groups for spec in group}
    params = [
        replace(sites.get(each.spec.name, each), spec=specs[each.spec.name])
        for each in unit.params
        if each.spec.name in specs
    ]
    for each, value in further:
        groups.append([each.spec])
        params.append(each)
        values[each.spec.name] = value
        if isinstance(value, ShardedParameter):  # stays the object that optimizers have
            known[each.spec.name] = value
    layout = lay_out_segments(groups, unit.ranks.gather.size, unit.plan.precision, unit.plan.align)
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    device = unit.shards.device if params else unit.plan.resting_device
    unit.rest_in(Shards(params, layout, plan, device, known))
    return values


def tie(home: Unit, slots: Sequence[tuple[Unit, int]], names: Sequence[str]) -> bool:
    """Make one parameter, of ``home``, of those in ``slots``, which modules show as one object.

    ``names`` are theirs from the home's module on; the first of ``slots`` gives shape and dtype.
    Collective, unless the units are on the meta device. Returns False if the object is on the meta
    device and the home's parameters are not: it will have values later. Raises `NotSupportedError`
    for DTensors and classes with ``fsdp_pre_all_gather``.
    """
    units = list(dict.fromkeys([home, *(unit for unit, _ in slots)]))
    leader = slots[0][0].params[slots[0][1]]
    everywhere = tuple(site for unit, index in slots for site in unit.params[index].sites)
    shown = leader.shown
    if shown.is_meta and not home.on_meta:
        return False
    if any(u.params[i].spec.apart or u.params[i].tensor_parallel is not None for u, i in slots):
        raise NotSupportedError(
            f"{' and '.join(map(repr, names))} were tied after sharding, and are DTensors or have "
            "fsdp_pre_all_gather; tie them before sharding"
        )
    before = [(table, key, table[key]) for u in units for p in u.params for table, key in p.sites]
    gone = {unit: {u.params[i].spec.name for u, i in slots if u is unit} for unit in units}
    stays = slots[0][0] is home
    if stays:
        gone[home].remove(leader.spec.name)
    unchecked = any(unit.unchecked for unit in units)
    aliases = tuple(name for name in names if name != names[0])
    one = replace(
        leader, spec=replace(leader.spec, name=names[0], aliases=aliases), sites=everywhere
    )
    if stays:
        one = replace(one, spec=replace(one.spec, name=leader.spec.name))

    def without(names_of_unit: set[str]) -> Callable[[list[ParamSpec]], list[list[ParamSpec]]]:
        def regroup(specs: list[ParamSpec]) -> list[list[ParamSpec]]:
            left = [one.spec if stays and s is leader.spec else s for s in specs]
            return [[spec for spec in left if spec.name not in names_of_unit]]

        return regroup

    for unit in units:
        if unit is not home and gone[unit]:
            _lay_out_anew(unit, without(gone[unit]))
    meta = torch.empty(leader.spec.shape, dtype=shown.dtype, device="meta")
    value = meta if home.on_meta and not shown.is_meta else shown
    further = [] if stays else [(one, value)]
    _lay_out_anew(home, without(gone[home]), further, {one.spec.name: one} if stays else {})
    home.unchecked = unchecked
    still_on_meta = {
        id(table) for u in units if u.on_meta for p in u.params for table, _ in p.sites
    }
    for table, key, value in [*before, *((*site, shown) for site in everywhere)]:
        if id(table) in still_on_meta:
            table[key] = value
    return True


def take_over(unit: Unit) -> None:
    """Take over what modules show in place of the sharded parameters.

    They do so after ``to_empty`` and after ``load_state_dict(assign=True)``. While some of the
    unit's parameters are still on the meta device, nothing happens. What another slot has, in this
    unit or in another, stays where it is shown: see `tie`.
    """
    shown = unit.shards.shown()
    ties = _ties(unit, shown)
    if all(a is b or n in ties for n, (a, b) in enumerate(zip(shown, unit.sharded, strict=True))):
        return
    if any(tensor.is_meta for tensor in shown):
        if unit.shards.device.type == "meta":
            return
        unit.show_sharded()
        raise UsageError(
            f"unit {unit.name!r} cannot be moved to the meta device: its values would be lost"
        )
    values = {each.spec.name: value for each, value in zip(unit.params, shown, strict=True)}
    known = {each.spec.name: p for each, p in zip(unit.params, unit.sharded, strict=True)}
    if unit.shards.device.type == "meta":
        for name, on_meta in known.items():
            mark_replaced(on_meta, name)
        tied = {unit.params[index].spec.name for index in ties}
        known = {
            name: value
            for name, value in values.items()
            if isinstance(value, ShardedParameter) and name not in tied
        }
        unit.unchecked = True
    unit.forget_lent()
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    device = unit.plan.resting_device
    unit.rest_in(Shards(unit.params, unit.layout, plan, device, known))
    for index, (each, value) in enumerate(zip(unit.params, shown, strict=True)):
        if index in ties:
            each.put(ties[index])
        elif not isinstance(value, ShardedParameter):
            set_owner(value, unit, each.spec.name)  # if others show it, too, they are tied
            if isinstance(value, DTensor):
                # Libraries leave notes on it; an optimizer may have it, which is then refused.
                unit.sharded[index].__dict__.update(notes_on(value))
                mark_replaced(value, each.spec.name)


def _ties(unit: Unit, shown: Sequence[Tensor]) -> dict[int, ShardedParameter]:
    """Find what slots have, by the numbers of this unit's parameters that show it instead."""
    ties: dict[int, ShardedParameter] = {}
    for index, value in enumerate(shown):
        owned = owner_of(value)
        if owned is not None and owned != (unit, index):
            held = owned[0].sharded[owned[1]]
            if value is held or unit.on_meta:
                ties[index] = held
    return ties


def check_initialised(unit: Unit) -> None:
    """Raise if a parameter that came from the meta device has no values yet. Collective.

    Memory for such parameters is filled with NaN when it is made, see
    `fullshard.torch.sharding.initialisation`.
    """
    if unit.on_meta:
        take_over(unit)
    bare = [
        param.ownership.name
        for param in unit.sharded
        if param.is_meta or (param.is_floating_point() and bool(torch.isnan(param.local).any()))
    ]
    if unit.ranks.any(bool(bare), unit.device):
        names = ", ".join(bare) or "(parameters that other ranks hold)"
        raise UsageError(
            f"unit {unit.name!r} came from the meta device, and nobody has initialised {names}: "
            "they have no values, or none that are numbers. Call the modules' reset_parameters() "
            "after to_empty(), or load a state dict"
        )
    unit.unchecked = False  # on all ranks, or on none
