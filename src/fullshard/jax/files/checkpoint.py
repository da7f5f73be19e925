# SPDX-License-Identifier: Apache-2.0
"""Saving a sharded state through Orbax, and resuming from it on any number of devices.

[Note: What a checkpoint holds]
Arrays are written as they rest, padded, flat or stacked, so that each device's part goes to disk
from where it is and nothing is gathered. A table beside them tells of each array of the model and
the optimizer which one it rests in. A step that lays everything out alike reads the parts back onto
its devices; any other, with another number of devices, reads one resting array after the other on
the host, takes it apart by the table, and lays its arrays out anew. Values are never computed with,
so either way gives the same bits.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fullshard.core.errors import ConfigurationError
from fullshard.jax.model import is_key
from fullshard.jax.step import TrainState, TrainStep

__all__ = ["restore_state", "save_state"]

_FORMAT = 1
_PARTS = ("params", "optimizer", "other")


def save_state(path: str | Path, step: TrainStep, state: TrainState) -> None:
    """Write ``state`` to the new folder ``path``: model, optimizer, random state and step count.

    With several processes all of them must call, with a path that all of them see. Returns when
    everything is on disk; the folder appears under its name then. The state stays valid.

    Raises:
        ConfigurationError: if ``path`` exists.
    """
    target = Path(path).absolute()
    if target.exists():
        raise ConfigurationError(f"{target} exists: a checkpoint is a new folder")
    layout = {"format": _FORMAT, "arrays": _table(step)}
    with _checkpointer() as checkpointer:
        checkpointer.save(
            target,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(_on_disk(_plain(state))), layout=ocp.args.JsonSave(layout)
            ),
        )


def restore_state(path: str | Path, step: TrainStep) -> TrainState:
    """The state that `save_state` wrote to ``path``, for this ``step`` and its devices.

    With several processes all of them must call. The number of devices may be another one than
    where it was saved; model and optimizer must have the same arrays.

    Raises:
        ConfigurationError: if ``path`` is no such checkpoint, or its arrays are not those of
            ``step``, by name, shape or dtype.
    """
    source = Path(path).absolute()
    with _checkpointer() as checkpointer:
        saved = _layout(checkpointer, source)
        mine = _table(step)
        _refuse_other_arrays(source, saved, mine)
        if saved == mine:
            return _restored_in_place(checkpointer, source, step)
        return step.load_arrays(step.init(), _taken_apart(checkpointer, source, saved))


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _table(step: TrainStep) -> dict[str, dict[str, Any]]:
    """Of each array, by key: what it is, and where it rests."""
    at_rest = _plain(step.abstract_state())
    table = {}
    for spec in step.specs:
        place = step.resting_place(spec.key)
        array = at_rest[place.part] if place.part == "step" else at_rest[place.part][place.name]
        table[spec.key] = {
            "shape": list(spec.shape),
            "dtype": spec.dtype,
            "part": place.part,
            "name": place.name,
            "layer": place.layer,
            "rest_shape": list(array.shape),
        }
    return table


def _plain(state: TrainState) -> dict[str, Any]:
    """The state as nested dicts of plain arrays; random keys as their data."""
    parts: dict[str, Any] = {name: getattr(state, name) for name in (*_PARTS, "step")}
    return jax.tree.map(_without_key, parts)


def _without_key(array: Any) -> Any:
    if not is_key(array):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, array)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=array.sharding)
    return jax.random.key_data(array)


def _layout(checkpointer: Any, source: Path) -> dict[str, dict[str, Any]]:
    try:
        found = checkpointer.restore(
            source, args=ocp.args.Composite(layout=ocp.args.JsonRestore())
        ).layout
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{source} is no checkpoint of save_state: {error}") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ConfigurationError(
            f"{source} has no layout of format {_FORMAT}, which this version reads"
        )
    arrays: dict[str, dict[str, Any]] = found["arrays"]
    return arrays


def _refuse_other_arrays(
    source: Path, saved: Mapping[str, Mapping[str, Any]], mine: Mapping[str, Mapping[str, Any]]
) -> None:
    lacking, unknown = sorted(mine.keys() - saved.keys()), sorted(saved.keys() - mine.keys())
    if lacking or unknown:
        raise ConfigurationError(
            f"the checkpoint {source} is of another model or optimizer: it lacks {lacking[:5]}, "
            f"and has {unknown[:5]} that are not here ({len(lacking)} and {len(unknown)} in all)"
        )
    for key, there in saved.items():
        here = mine[key]
        if (there["shape"], there["dtype"]) != (here["shape"], here["dtype"]):
            raise ConfigurationError(
                f"{key} is {there['dtype']} of shape {there['shape']} in the checkpoint {source}, "
                f"{here['dtype']} of shape {here['shape']} here"
            )


def _restored_in_place(checkpointer: Any, source: Path, step: TrainStep) -> TrainState:
    """Each device reads the part that it had."""
    typed = step.abstract_state()
    at_rest = _plain(typed)
    wanted = _on_disk(at_rest)
    arguments = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype),
        wanted,
    )
    found = checkpointer.restore(
        source,
        args=ocp.args.Composite(state=ocp.args.PyTreeRestore(wanted, restore_args=arguments)),
    ).state
    empty = jax.tree.map(
        lambda x: None if x.size else jnp.zeros(x.shape, x.dtype, device=x.sharding), at_rest
    )
    for part in _PARTS:
        kept = {name: x for name, x in empty[part].items() if x is not None}
        found[part] = {**(found.get(part) or {}), **kept}
    keyed = {name: getattr(typed, name) for name in found}
    return TrainState(**jax.tree.map(_with_key, found, keyed))


def _on_disk(parts: dict[str, Any]) -> dict[str, Any]:
    """What Orbax takes: all but arrays without elements."""
    kept = {
        name: {each: x for each, x in parts[name].items() if x.size}
        for name in _PARTS
        if any(x.size for x in parts[name].values())
    }
    return {**kept, "step": parts["step"]}


def _with_key(array: Any, typed: Any) -> Any:
    if not is_key(typed):
        return array
    kinds: list[Any] = []
    # Of a shape alone nobody tells the kind of key, of a traced one they do.
    jax.eval_shape(lambda key: kinds.append(jax.random.key_impl(key)), typed)
    return jax.random.wrap_key_data(array, impl=kinds[0])


def _taken_apart(
    checkpointer: Any, source: Path, saved: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Key and true array of everything saved; one resting array is in memory at a time."""
    at_rest: dict[tuple[str, str], list[str]] = {}
    for key, there in saved.items():
        at_rest.setdefault((there["part"], there["name"]), []).append(key)
    for (part, name), keys in at_rest.items():
        if 0 in saved[keys[0]]["shape"]:
            for key in keys:
                yield key, np.zeros(saved[key]["shape"], jnp.dtype(saved[key]["dtype"]))
            continue
        array = _read(checkpointer, source, part, name)
        for key in keys:
            there = saved[key]
            whole = array if there["layer"] is None else array[there["layer"]]
            shape = there["shape"]
            if list(whole.shape) != shape:  # flat, padded at its end
                whole = whole[: math.prod(shape)].reshape(shape)
            yield key, whole


def _read(checkpointer: Any, source: Path, part: str, name: str) -> np.ndarray[Any, Any]:
    """One resting array, whole on the host."""

    def at_its_place(value: Any) -> Any:
        return {part: value if part == "step" else {name: value}}

    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    found = checkpointer.restore(
        source,
        args=ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                at_its_place(0), restore_args=at_its_place(as_numpy), partial_restore=True
            )
        ),
    ).state
    array: np.ndarray[Any, Any] = found[part] if part == "step" else found[part][name]
    return array
