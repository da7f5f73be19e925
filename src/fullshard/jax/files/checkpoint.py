# SPDX-License-Identifier: Apache-2.0
"""Saving a sharded state through Orbax, and resuming from it on any number of devices.

[Note: What a checkpoint holds]
Arrays are written as they rest, each device's part from where it is. They have their true shapes,
or are padded at the end of one dimension. So a step on other devices reads its own parts of the
same arrays: Orbax cuts off what is too long and fills up with zeros what is too short, and either
is padding. A table of true shapes and dtypes beside them is compared before anything is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from fullshard.core.errors import ConfigurationError
from fullshard.jax.arrays.leaves import as_key, key_data
from fullshard.jax.training.step import TrainState, TrainStep

__all__ = ["restore_state", "save_state"]

_FORMAT = 2


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
    arrays = {
        spec.key: key_data(leaf)
        for spec, leaf in zip(step.specs, jax.tree.leaves(state), strict=True)
        if leaf.size
    }
    with _checkpointer() as checkpointer:
        checkpointer.save(
            target,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays), layout=ocp.args.JsonSave(layout)
            ),
        )


def restore_state(path: str | Path, step: TrainStep) -> TrainState:
    """The state that `save_state` wrote to ``path``, for this ``step`` and its devices.

    With several processes all of them must call; each device reads its own parts. The number of
    devices may be another one than where it was saved; model and optimizer must have the same
    arrays.

    Raises:
        ConfigurationError: if ``path`` is no such checkpoint, or its arrays are not those of
            ``step``, by name, shape or dtype.
    """
    source = Path(path).absolute()
    abstract = step.abstract_state()
    leaves = dict(zip((spec.key for spec in step.specs), jax.tree.leaves(abstract), strict=True))
    wanted = {key: key_data(leaf) for key, leaf in leaves.items() if leaf.size}
    arguments = {
        key: ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
        )
        for key, leaf in wanted.items()
    }
    with _checkpointer() as checkpointer:
        _refuse_other_arrays(source, _layout(checkpointer, source), _table(step))
        found = checkpointer.restore(
            source,
            args=ocp.args.Composite(state=ocp.args.PyTreeRestore(wanted, restore_args=arguments)),
        ).state
    restored = [
        as_key(found[key], leaf)
        if key in found
        else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        for key, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), restored)


def _checkpointer() -> Any:
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _table(step: TrainStep) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each array, by key."""
    return {each.key: {"shape": list(each.shape), "dtype": each.dtype} for each in step.specs}


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
