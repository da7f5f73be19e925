# SPDX-License-Identifier: Apache-2.0
"""The weights of a sharded state as one safetensors file, in true shapes, an array at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all
from numpy.typing import NDArray

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
from fullshard.jax.files.torch_names import TorchName
from fullshard.jax.training.step import TrainState, TrainStep

__all__ = ["load_weights", "save_weights"]

_KINDS = ("parameters", "other")

_NUMPY_NAMES = {told: name for name, told in STORED_DTYPES.items()}

Names = Mapping[str, TorchName]


@dataclass(frozen=True)
class _Stored:
    """An array of the state, under one name in the file, where it has its ``axes`` in that order.

    ``tied`` tells that it is in the file under another name, too.
    """

    key: str
    entry: Entry
    axes: tuple[int, ...]
    tied: bool

    def in_file(self, array: NDArray[Any]) -> memoryview:
        """Its bytes as the file has them."""
        turned = np.ascontiguousarray(array.transpose(self.axes))
        return turned.reshape(-1).view(np.uint8).data

    def from_file(self, raw: NDArray[np.uint8]) -> NDArray[Any]:
        """The array as the state has it: a view of its bytes in the file."""
        dtype = jnp.dtype(_NUMPY_NAMES[self.entry.dtype])
        back = [self.axes.index(axis) for axis in range(len(self.axes))]
        return raw.view(dtype).reshape(self.entry.shape).transpose(back)


def save_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> None:
    """Write the parameters of ``state`` (and statistics, as of BatchNorm) to one safetensors file.

    Arrays have their true shapes, without padding. With ``names``, as
    `fullshard.jax.torch_names` gives them, the file is what the torch model's
    ``load_state_dict`` wants, and only arrays with a name are in it; without, arrays are called by
    their paths here. One array is gathered at a time. The file appears at ``path`` when it is
    complete. With several processes all of them must call; process 0 writes.

    Raises:
        ConfigurationError: on all processes, if the file cannot be written or cannot hold a dtype.
    """
    stored = _stored(step, names)
    target = Path(path)
    writer = None
    if jax.process_index() == 0:
        writer = FileWriter(target, header_of({name: each.entry for name, each in stored.items()}))
    by_key: dict[str, list[_Stored]] = {}
    for each in stored.values():
        by_key.setdefault(each.key, []).append(each)
    try:
        for key, places in by_key.items():
            array = step.gather_array(state, key)
            if writer is not None:
                for each in places:
                    writer.append(each.in_file(array))
        if writer is not None:
            writer.finish()
    finally:
        if writer is not None:
            writer.abandon()
    failure = writer.failure if writer is not None else None
    _raise_together(f"could not write the weights to {target}", failure)


def load_weights(
    path: str | Path, step: TrainStep, state: TrainState, names: Names | None = None
) -> TrainState:
    """The ``state`` with the weights of one safetensors file; the state given is used up.

    The file is as `save_weights` writes it with the same ``names``, or as safetensors writes a
    torch model's ``state_dict()``; names of tied parameters may be missing, as long as one is
    there. Any number of devices; an array is read where its turn comes. With several processes all
    of them must call, and all read the file.

    Raises:
        ConfigurationError: if the file cannot be read or does not fit: another array, shape or
            dtype, or tied parameters with different values. The state is as it was then.
    """
    source = Path(path)
    try:
        stored = _stored(step, names)
        there = entries_in(source)
        wanted = {name: each for name, each in stored.items() if not each.tied or name in there}
        places = places_in(source, {name: each.entry for name, each in wanted.items()})
        _refuse_unequal_ties(source, wanted, places)
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"cannot load the weights in {source}: {error}") from error
    return step.load_arrays(state, _read(source, wanted, places))


def _stored(step: TrainStep, names: Names | None) -> dict[str, _Stored]:
    """The contents of the file, by their names there, in the order of the file."""
    stored: dict[str, _Stored] = {}
    for spec in step.specs:
        if spec.kind not in _KINDS:
            continue
        if spec.dtype not in STORED_DTYPES:
            raise ConfigurationError(f"{spec.path!r} is {spec.dtype}, which the format cannot hold")
        axes = tuple(range(len(spec.shape)))
        there = TorchName(spec.path, axes) if names is None else names.get(spec.path)
        if there is None:
            if spec.kind == "parameters":
                raise ConfigurationError(f"no name is given for the parameter {spec.path!r}")
            continue
        shape = tuple(spec.shape[axis] for axis in there.axes)
        entry = Entry(STORED_DTYPES[spec.dtype], shape)
        for name in (there.name, *there.tied):
            stored[name] = _Stored(spec.key, entry, there.axes, tied=name != there.name)
    return stored


def _refuse_unequal_ties(
    source: Path, wanted: Mapping[str, _Stored], places: Mapping[str, EntryPlace]
) -> None:
    first: dict[str, str] = {}
    for name, each in wanted.items():
        if not each.tied:
            first[each.key] = name
    for name, each in wanted.items():
        other = first[each.key]
        if name == other:
            continue
        mine, others = (_raw(source, places[called]) for called in (name, other))
        if not np.array_equal(mine, others):
            raise ConfigurationError(
                f"{name!r} and {other!r} are one parameter in the model, and differ in the file"
            )


def _raw(source: Path, place: EntryPlace) -> NDArray[np.uint8]:
    """The bytes of one entry."""
    raw = np.empty(place.entry.size_bytes, np.uint8)
    with SliceReader(source) as file:
        file.read_into(raw.data, place.start)
    return raw


def _read(
    source: Path, wanted: Mapping[str, _Stored], places: Mapping[str, EntryPlace]
) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, each in wanted.items():
        if not each.tied:
            yield each.key, each.from_file(_raw(source, places[name]))


def _raise_together(what: str, failure: Exception | None) -> None:
    """Raise `ConfigurationError` on all processes if process 0 has a ``failure``."""
    failed = failure is not None
    if jax.process_count() > 1:
        failed = bool(broadcast_one_to_all(np.int32(failed)))
    if failed:
        raise ConfigurationError(f"{what}: {failure or 'the error is on process 0'}") from failure
