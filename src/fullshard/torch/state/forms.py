# SPDX-License-Identifier: Apache-2.0
"""The forms in which state dicts show sharded values: whole tensors, DTensors, or spans."""

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch import Tensor
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.protocol import Comm
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.state.dtensors import as_dtensors
from fullshard.torch.tensor.ownership import gathered_together
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.placements import Placed


@dataclass(frozen=True)
class StateForm:
    """The form in which a state dict shows sharded values.

    ``kind``: FULL_STATE_DICT is whole tensors, SHARDED_STATE_DICT DTensors, LOCAL_STATE_DICT this
    rank's spans as flat plain tensors. ``on_host``: in host memory. ``kept``: False for a rank that
    takes part and gets nothing. ``shared``: plain tensors share memory with the model, as
    `ShardedDTensor`s always do in the form of DTensors.
    """

    kind: StateDictType
    on_host: bool = False
    kept: bool = True
    shared: bool = False


class LocalSpan(Tensor):
    """This rank's span of a value in a LOCAL_STATE_DICT, flat.

    `torch.distributed.checkpoint` would take the spans of all ranks for copies of one tensor and
    keep that of one rank, so it is refused. To everybody else it is a plain tensor, as which
    `torch.save` writes it.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise NotSupportedError(
            f"an entry of {self.numel()} elements of a LOCAL_STATE_DICT is this rank's span "
            "without its place in the whole, which torch.distributed.checkpoint must know: use "
            "SHARDED_STATE_DICT with it, or torch.save on each rank"
        )

    # What it calls to save and to load.
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be written as a plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalSpan":
        """Copy the elements; the class stays."""
        return self.clone()  # type: ignore[return-value]


K = TypeVar("K")

AS_DTENSORS = StateForm(StateDictType.SHARDED_STATE_DICT, shared=True)
_INSTEAD = {
    StateDictType.FULL_STATE_DICT: "call it on every rank, and write on one: "
    "state = model.state_dict(); if rank == 0: torch.save(state, path)",
    StateDictType.SHARDED_STATE_DICT: "call it on every rank; its entries are DTensors, of which "
    "each rank has its rows, for torch.distributed.checkpoint.save. For one file: "
    "fullshard.torch.save_full_weights(model, path), on every rank",
}


class _Doors(threading.local):
    def __init__(self) -> None:
        self.open: list[str] = []


_doors = _Doors()


@contextmanager
def collecting(door: str) -> Iterator[tuple[bool, bool]]:
    """Enter the collection of a state dict of a module of the interface ``door``.

    Yields if it is the outermost of all, which changes form, and the outermost of that interface.
    """
    _doors.open.append(door)
    try:
        yield len(_doors.open) == 1, _doors.open.count(door) == 1
    finally:
        _doors.open.pop()


def hand_out(state: MutableMapping[str, Any], prefix: str, form: StateForm) -> None:
    """Change the entries of a module's state dict whose names begin with ``prefix``."""
    entries = {name: value for name, value in state.items() if name.startswith(prefix)}
    change_form(entries, form, "state_dict()", _INSTEAD.get(form.kind, ""))
    for name in [name for name in state if name.startswith(prefix)]:
        if name in entries:
            state[name] = entries[name]
        else:
            del state[name]


def ask_before_loading(
    values: Iterable[Any], params: Iterable[Any], what: str = "load_state_dict() of DTensors"
) -> None:
    """Call the roll if loading ``values`` into ``params`` is collective, as for DTensors."""
    owners = [each.ownership for each in params if isinstance(each, ShardedParameter)]
    placed = {each.placed for each in owners}
    if any(
        isinstance(each, DTensor) and Placed(each.device_mesh, tuple(each.placements)) not in placed
        for each in values
    ):
        comms = list(dict.fromkeys(comm for owner in owners for comm in owner.comms))
        call_roll(comms, what, "call it on every rank, or load whole tensors")


def change_form(values: MutableMapping[Any, Any], form: StateForm, what: str, instead: str) -> None:
    """Replace sharded values by those that ``form`` asks for. Collective, except for spans.

    Whole tensors are gathered unit by unit, so a rank that keeps none, or keeps them in host
    memory, never has more than one unit's on its device. Results have memory of their own, unless
    ``form`` says otherwise; tied values stay one tensor. ``what`` and ``instead`` go into the error
    of a rank that calls alone, see `call_roll`.
    """
    sharded = in_agreed_order(values)
    if form.kind is not StateDictType.LOCAL_STATE_DICT:
        as_they_are = DTensor if form.kind is StateDictType.SHARDED_STATE_DICT else ()
        moved = {
            key: each
            for key, each in sharded.items()
            if not (each.is_meta or isinstance(each, as_they_are))
        }
        comms = [comm for each in moved.values() for comm in each.ownership.comms]
        call_roll(comms, what, instead)
        verify_same_values(moved, what)
    if form.kind is StateDictType.SHARDED_STATE_DICT:
        made = as_dtensors(list(sharded.values()))
        values.update(zip(sharded, made, strict=True))
    known: dict[int, Any] = {}  # of tied values the first
    whole = form.kind is StateDictType.FULL_STATE_DICT
    for local, full in _gathered(sharded.values()) if whole else ():
        known[id(local)] = _placed(full, form)
        del full
    for key in [*sharded, *(key for key in values if key not in sharded)]:
        value = values[key]
        source = sharded.get(key)
        number = id(value) if source is None else id(source.local)
        if number not in known:
            known[number] = _taken(value, source, form)
        if form.kept:
            values[key] = known[number]
        else:
            del values[key]


def _gathered(values: Iterable[ShardedParameter]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part and the whole of all ``values``, by one gather a unit. Collective."""
    units: dict[Any, dict[int, ShardedParameter]] = {}
    for each in values:
        unit = each.ownership.comm, each.ownership.unit, each.dtype, each.device.type
        units.setdefault(unit, {})[id(each.local)] = each
    for together in units.values():
        first, locals_ = next(iter(together.values())), [each.local for each in together.values()]
        parts = [(each.ownership, each.local.detach()) for each in together.values()]
        label = f"full tensors of the unit of {first.ownership.name!r} in {first.dtype}"
        yield from zip(locals_, gathered_together(parts, label), strict=True)


def in_agreed_order(values: Mapping[K, Any]) -> dict[K, ShardedParameter]:
    """The sharded ones of ``values`` in an order on which all ranks agree.

    Users may have put them together in another order on each rank, as from a `set`. A key is a
    name, or what belongs to one parameter and the name of a part of its state.
    """
    found = [
        (each.ownership.place, str(key[-1] if isinstance(key, tuple) else key), key, each)
        for key, each in values.items()
        if isinstance(each, ShardedParameter)
    ]
    return {key: each for _, _, key, each in sorted(found, key=lambda each: each[:2])}


def verify_same_values(values: Mapping[Any, ShardedParameter], what: str) -> None:
    """Raise `ConfigurationError` on all ranks unless all send these ``values``. Collective."""
    by_comm: dict[Comm, dict[str, str]] = {}
    for key, each in values.items():
        owner = each.ownership
        part = f", {key[-1]}" if isinstance(key, tuple) else ""
        for comm in owner.comms:
            lines = by_comm.setdefault(comm, {})
            lines[f"{owner.name}{part} ({len(lines)})"] = f"{owner.shape} {each.dtype}"
    for comm, lines in by_comm.items():
        if comm.size > 1:
            device = next(iter(values.values())).device
            verify_agreement(comm, lines, device, f"what is in {what}")


def _taken(value: Any, source: ShardedParameter | None, form: StateForm) -> Any:
    if not form.kept and form.kind is not StateDictType.FULL_STATE_DICT:
        return None
    if isinstance(value, DTensor) and form.kind is StateDictType.FULL_STATE_DICT:
        value = value.full_tensor()
    elif source is not None and form.kind is StateDictType.LOCAL_STATE_DICT:
        value = source.local.detach().clone().as_subclass(LocalSpan)
    elif source is None and isinstance(value, Tensor) and not form.shared:
        value = value.detach().clone()
    return _placed(value, form)


def _placed(value: Any, form: StateForm) -> Any:
    if not form.kept:
        return None
    return value.cpu() if form.on_host and isinstance(value, Tensor) else value
