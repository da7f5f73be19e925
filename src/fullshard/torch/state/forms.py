# SPDX-License-Identifier: Apache-2.0
"""What ``state_dict()`` of a sharded model gives: whole tensors, DTensors, or spans."""

import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.torch.comm.roll_call import call_roll
from fullshard.torch.state.dtensors import as_dtensors
from fullshard.torch.state.state_dict_types import StateDictType
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["AS_DTENSORS", "Form", "ask_before_loading", "change_form", "collecting", "hand_out"]


@dataclass(frozen=True)
class Form:
    """How sharded values are handed out.

    ``kind``: FULL_STATE_DICT is whole tensors, SHARDED_STATE_DICT DTensors, LOCAL_STATE_DICT this
    rank's spans as flat plain tensors. ``on_host``: in host memory. ``kept``: False for a rank that
    takes part and gets nothing.
    """

    kind: StateDictType
    on_host: bool = False
    kept: bool = True


AS_DTENSORS = Form(StateDictType.SHARDED_STATE_DICT)
_INSTEAD = {
    StateDictType.FULL_STATE_DICT: "call it on every rank, and write on one: "
    "state = model.state_dict(); if rank == 0: torch.save(state, path)",
    StateDictType.SHARDED_STATE_DICT: "call it on every rank; its entries are DTensors, of which "
    "each rank has its rows, for torch.distributed.checkpoint.save. For one file: "
    "fullshard.torch.save_full_weights(model, path), on every rank",
}


class _Depth(threading.local):
    value = 0


_depth = _Depth()


@contextmanager
def collecting() -> Iterator[bool]:
    """Around the collection of a state dict: True for the outermost one, which is to be changed."""
    _depth.value += 1
    try:
        yield _depth.value == 1
    finally:
        _depth.value -= 1


def hand_out(state: MutableMapping[str, Any], prefix: str, form: Form) -> None:
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
    """Call the roll if loading ``values`` into ``params`` is collective: if there are DTensors."""
    if any(isinstance(value, DTensor) for value in values):
        owners = [each.ownership for each in params if isinstance(each, ShardedParameter)]
        comms = list(dict.fromkeys(comm for owner in owners for comm in owner.comms))
        call_roll(comms, what, "call it on every rank, or load whole tensors")


def change_form(values: MutableMapping[Any, Any], form: Form, what: str, instead: str) -> None:
    """Replace the sharded ones of ``values`` by what ``form`` says. Collective but for spans.

    Whole tensors are gathered one by one, so a rank that keeps none, or keeps them in host memory,
    never has more than one on its device. What others are handed has memory of its own, plain
    tensors too; tied values stay one tensor. ``what`` and ``instead`` are
    for the error of a rank that calls alone, see `call_roll`.
    """
    sharded = {key: each for key, each in values.items() if isinstance(each, ShardedParameter)}
    if form.kind is not StateDictType.LOCAL_STATE_DICT:
        moved = [each.ownership for each in sharded.values() if not each.is_meta]
        call_roll([comm for owner in moved for comm in owner.comms], what, instead)
    if form.kind is StateDictType.SHARDED_STATE_DICT:
        made = as_dtensors(list(sharded.values()))
        values.update(zip(sharded, made, strict=True))
    known: dict[int, Any] = {}  # of tied values the first
    for key, value in list(values.items()):
        source = sharded.get(key)
        number = id(value) if source is None else id(source.local)
        if number not in known:
            known[number] = _taken(value, source, form)
        if form.kept:
            values[key] = known[number]
        else:
            del values[key]


def _taken(value: Any, source: ShardedParameter | None, form: Form) -> Any:
    if not form.kept and form.kind is not StateDictType.FULL_STATE_DICT:
        return None
    if source is not None and form.kind is StateDictType.FULL_STATE_DICT:
        value = source.gathered()
    elif isinstance(value, DTensor) and form.kind is StateDictType.FULL_STATE_DICT:
        value = value.full_tensor()
    elif source is not None and form.kind is StateDictType.LOCAL_STATE_DICT:
        value = source.local.detach().clone()
    elif source is None and isinstance(value, Tensor):
        value = value.detach().clone()
    if not form.kept:
        return None
    return value.cpu() if form.on_host and isinstance(value, Tensor) else value
