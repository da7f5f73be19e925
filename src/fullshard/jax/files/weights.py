# SPDX-License-Identifier: Apache-2.0
"""The weights of a sharded state as one safetensors file, in true shapes, an array at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fullshard.checkpoint.ranks import agree
from fullshard.core.errors import ConfigurationError
from fullshard.core.safetensors_format import (
    Entry,
    EntryPlace,
    FileWriter,
    SliceReader,
    entries_in,
    header_of,
    places_in,
)
from fullshard.jax.arrays.leaves import STORED_DTYPES
from fullshard.jax.files.leaves import Leaf, Names, StoredAs
from fullshard.jax.files.processes import process_ranks
from fullshard.jax.training.step import TrainState, TrainStep

__all__ = ["load_weights", "save_weights"]


def save_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> None:
    """Write the parameters of ``state`` (and statistics, as of BatchNorm) to one safetensors file.

    With ``names``, as `fullshard.jax.torch_names` gives them, the file is what the torch model's
    ``load_state_dict`` wants, and only arrays with a name are in it; without, arrays are called by
    their paths here. One array is gathered at a time. The file appears at ``path`` when it is
    complete. With several processes all of them must call; process 0 writes.

    Raises:
        ConfigurationError: on all processes, if the file cannot be written or cannot hold a dtype.
    """
    target, leaves = Path(path), _leaves(step, names)
    writer = None
    if jax.process_index() == 0:
        writer = FileWriter(target, header_of(_entries(leaves)))
    try:
        for key, leaf in leaves.items():
            array = step.gather_array(state, key)
            if writer is not None:
                raw = leaf.as_stored(array).reshape(-1).view(np.uint8).data
                for _ in _names(leaf):
                    writer.append(raw)
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.abandon()
    failed = ConfigurationError(str(writer.failure)) if writer and writer.failure else None
    agree(process_ranks(), f"could not write the weights to {target}", failed)


def load_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> TrainState:
    """The ``state`` with the weights of one safetensors file; the state given is used up.

    The file is as `save_weights` writes it with the same ``names``, or as safetensors writes a
    torch model's ``state_dict()``; aliases of tied parameters may be missing. Any number of
    devices; an array is read where its turn comes. With several processes all of them must call,
    and all read the file.

    Raises:
        ConfigurationError: if the file cannot be read or does not fit: another array, shape or
            dtype, or tied parameters with different values. The state is as it was then.
    """
    source = Path(path)
    try:
        leaves = _leaves(step, names)
        there, known = entries_in(source), _entries(leaves)
        aliases = {alias for leaf in leaves.values() for alias in leaf.stored.aliases}
        wanted = {name: x for name, x in known.items() if name in there or name not in aliases}
        places = places_in(source, wanted)
        for leaf in leaves.values():
            _refuse_unequal_ties(source, leaf.stored, places)
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"cannot load the weights in {source}: {error}") from error

    def arrays() -> Iterator[tuple[str, NDArray[Any]]]:
        for key, leaf in leaves.items():
            raw = _raw(source, places[leaf.stored.name])
            yield key, leaf.as_held(raw.view(jnp.dtype(leaf.dtype)).reshape(leaf.shape))

    return step.load_arrays(state, arrays())


def _leaves(step: TrainStep, names: Names | None) -> dict[str, Leaf]:
    """The contents of the file by key of the state, in the order of the file."""
    leaves: dict[str, Leaf] = {}
    for spec in step.specs:
        if spec.kind not in ("parameters", "other"):
            continue
        if spec.dtype not in STORED_DTYPES:
            raise ConfigurationError(f"{spec.path!r} is {spec.dtype}, which the format cannot hold")
        stored = StoredAs(spec.path) if names is None else names.get(spec.path)
        if stored is not None:
            shape = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))
            leaves[spec.key] = Leaf(spec.path, shape, stored)
        elif spec.kind == "parameters":
            raise ConfigurationError(f"no name is given for the parameter {spec.path!r}")
    return leaves


def _names(leaf: Leaf) -> tuple[str, ...]:
    return (leaf.stored.name, *leaf.stored.aliases)


def _entries(leaves: Mapping[str, Leaf]) -> dict[str, Entry]:
    return {name: Entry(STORED_DTYPES[leaf.dtype], leaf.shape)
            for leaf in leaves.values() for name in _names(leaf)}  # fmt: skip


def _refuse_unequal_ties(source: Path, stored: StoredAs, places: Mapping[str, EntryPlace]) -> None:
    for alias in stored.aliases:
        if alias in places and not np.array_equal(
            _raw(source, places[alias]), _raw(source, places[stored.name])
        ):
            raise ConfigurationError(
                f"{alias!r} and {stored.name!r} are one parameter in the model, and differ in the "
                "file"
            )


def _raw(source: Path, place: EntryPlace) -> NDArray[np.uint8]:
    """The bytes of one entry."""
    raw = np.empty(place.entry.size_bytes, np.uint8)
    with SliceReader(source) as file:
        file.read_into(raw.data, place.start)
    return raw
