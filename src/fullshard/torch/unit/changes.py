# SPDX-License-Identifier: Apache-2.0
"""Changes of a unit between steps: parameters thawed, given up, cast, materialised or assigned."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.layout import lay_out_segments
from fullshard.core.spec import ParamSpec
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name, dtype_of
from fullshard.torch.unit.guards.replaced import Successor, mark_replaced, put_back
from fullshard.torch.unit.shards import Shards
from fullshard.torch.unit.sites import notes_on
from fullshard.torch.unit.unit import Unit, UnitState

__all__ = [
    "LOW_PRECISION",
    "check_initialised",
    "follow_requires_grad",
    "gather_apart",
    "give_up",
    "rest_in_float32",
    "rest_on",
    "take_over",
]

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


def rest_in_float32(unit: Unit) -> list[Successor]:
    """Keep trained parameters of lower precision in float32. Collective.

    Returns which new parameter replaces which, since a tensor cannot change its dtype.
    """
    before, names = unit.sharded, [param.ownership.name for param in unit.sharded]
    _lay_out_anew(unit, lambda specs: [[_raised(spec) for spec in specs]])
    replaced: list[Successor] = []
    for old, new, name in zip(before, unit.sharded, names, strict=True):
        if new is not old:
            new.ownership = replace(new.ownership, name=name)
            mark_replaced(old, name)
            replaced.append((ref(old), new))
    return replaced


def _raised(spec: ParamSpec) -> ParamSpec:
    low = spec.trainable and dtype_of(spec.dtype) in LOW_PRECISION
    return replace(spec, dtype=dtype_name(torch.float32)) if low else spec


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
    waiting = unit.gradients.kept or unit.gradients.reducing
    if unit.on_meta or waiting or unit.state in (UnitState.GRADS, UnitState.FULL_WITH_GRADS):
        raise UsageError(
            f"unit {unit.name!r} cannot be moved to {device} now: it is on the meta device, or "
            "holds gradients that are not reduced yet. Move it between steps"
        )
    values = {each.spec.name: p for each, p in zip(unit.params, unit.sharded, strict=True)}
    if unit.is_full and not unit.resident:
        unit.free()
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    unit.rest_in(Shards(unit.params, unit.layout, plan, device, values))
    for grad in (param.grad for param in unit.sharded):
        if isinstance(grad, ShardedParameter):
            grad.local = grad.local.to(device)
    return True


def _lay_out_anew(
    unit: Unit, regroup: Callable[[list[ParamSpec]], list[list[ParamSpec]]]
) -> dict[str, Tensor]:
    """Lay out anew by ``regroup``, per segment; return full values by name. Collective."""
    full = unit.full_views(unit.gather_values())
    values = {each.spec.name: view for each, view in zip(unit.params, full, strict=True)}
    known = {each.spec.name: p for each, p in zip(unit.params, unit.sharded, strict=True)}
    old = [[slot.spec for slot in segment.slots] for segment in unit.layout.segments]
    groups = [group for specs in old for group in regroup(specs) if group]
    specs = {spec.name: spec for group in groups for spec in group}
    params = [
        replace(each, spec=specs[each.spec.name]) for each in unit.params if each.spec.name in specs
    ]
    layout = lay_out_segments(groups, unit.ranks.gather.size, unit.plan.precision, unit.plan.align)
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    unit.rest_in(Shards(params, layout, plan, unit.shards.device, known))
    return values


def take_over(unit: Unit) -> None:
    """Take over what modules show in place of the sharded parameters.

    They do so after ``to_empty`` and after ``load_state_dict(assign=True)``. While some of the
    unit's parameters are still on the meta device, nothing happens.
    """
    shown = unit.shards.shown()
    if all(a is b for a, b in zip(shown, unit.sharded, strict=True)):
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
        known = {name: v for name, v in values.items() if isinstance(v, ShardedParameter)}
        unit.unchecked = True
    unit.forget_lent()
    plan = replace(unit.plan, values=lambda each: values[each.spec.name])
    device = unit.plan.resting_device
    unit.rest_in(Shards(unit.params, unit.layout, plan, device, known))
    for each, value, param in zip(unit.params, shown, unit.sharded, strict=True):
        if isinstance(value, DTensor) and not isinstance(value, ShardedParameter):
            # Libraries leave notes on it, and an optimizer may have it, which is then refused.
            param.__dict__.update(notes_on(value))
            mark_replaced(value, each.spec.name)


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
