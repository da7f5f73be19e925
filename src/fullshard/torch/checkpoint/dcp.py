# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ``torch.distributed.checkpoint`` (DCP): out and in, in one process.

A DCP checkpoint has flat names, such as ``model.layers.0.weight`` and
``optimizer.state.layers.0.weight.exp_avg``: what ``dcp.save({"model": ..., "optimizer": ...})``
writes of the dicts that `torch.distributed.checkpoint.state_dict.get_state_dict` gives. Its
metadata is a pickle; it is read by an unpickler that knows the classes of DCP's metadata and
nothing else.
"""

import io
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from fullshard.checkpoint import Checkpoint, SoloRanks
from fullshard.checkpoint.format.stored import About
from fullshard.checkpoint.saving import save
from fullshard.core.errors import CheckpointError, ConfigurationError
from fullshard.torch.checkpoint.tensors import DTYPES, local_part, piece_of
from fullshard.torch.checkpoint.values import decode, encode

_STATE = re.compile(r"optimizer\.state\.(.+)\.([A-Za-z_0-9]+)")
_GROUP = re.compile(r"optimizer\.param_groups\.(.+)\.([A-Za-z_0-9]+)")


# -- out -----------------------------------------------------------------------------------------


def export_dcp(checkpoint: Checkpoint, target: str | Path) -> Path:
    """Write models and optimizers as a DCP checkpoint, whole tensors in one process.

    ``dcp.load`` reads it on any number of ranks into the state dicts that ``get_state_dict`` gives.
    Everything is verified while it is read. Needs host memory for all tensors.
    """
    target = Path(target)
    state: dict[str, Any] = {}
    described = decode(checkpoint.manifest.state) or {}
    names = [*checkpoint.manifest.tensors, *checkpoint.manifest.aliases]
    optimizers = described.get("optimizers", {})
    for name in names:
        owner, _, rest = name.partition("/")
        if owner in optimizers:
            kind, _, param = rest.partition("/")
            key = f"{owner}.state.{_without_model(param)}.{kind}"
        elif owner == "random":
            continue
        else:
            key = f"{owner}.{rest}"
        state[key] = _whole(checkpoint, name)
    for owner, told in optimizers.items():
        state.update(_settings(owner, told))
        for param, values in told.get("values", {}).items():
            of = f".{_without_model(param)}" if param else ""  # else of no parameter
            for kind, value in values.items():
                state[f"{owner}.state{of}.{kind}"] = value
    is_new = not target.exists()
    with _told_in_our_words(f"{target} cannot be written", target):
        try:
            save_dcp(state, checkpoint_id=target, no_dist=True)
        except BaseException:
            if is_new:
                shutil.rmtree(target, ignore_errors=True)
            raise
    return target


@contextmanager
def _told_in_our_words(what: str, path: Path) -> Iterator[None]:
    """Raise `CheckpointError` for whatever DCP raises, some of which is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*the intent is to .* in a single process")
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        why = causes[0] if causes else error
        words = f"{type(why).__name__}: {str(why).strip().partition(chr(10))[0]}"
        raise CheckpointError(f"{what}: {words}", file=str(path)) from error


def _settings(owner: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The groups in both of DCP's forms: by number, and flattened, by parameter."""
    state: dict[str, Any] = {}
    for number, group in enumerate(told["groups"]):
        params = [_without_model(param) for param in group["params"]]
        state[f"{owner}.param_groups.{number}.params"] = params
        for kind, value in group.items():
            if kind != "params":
                for each in (number, *params):
                    state[f"{owner}.param_groups.{each}.{kind}"] = value
    return state


def _without_model(name: str) -> str:
    return name.partition("/")[2]


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    stored = checkpoint.stored(name)
    data = torch.from_numpy(checkpoint.read(name).reshape(-1).view("u1"))
    return data.view(DTYPES[stored.dtype]).view(stored.shape)


# -- in ------------------------------------------------------------------------------------------


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata; a name outside of what that needs is refused."""

    _CLASSES = (
        re.compile(r"torch\.distributed\.checkpoint\.(metadata|filesystem|_hf_utils)"),
        re.compile(r"torch\.serialization|torch\._utils|torch"),
    )
    _NAMES = (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "Size"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        *("_StorageInfo", "_get_layout"),
    )

    def find_class(self, module: str, name: str) -> Any:
        known = any(pattern.fullmatch(module) for pattern in self._CLASSES)
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        path = (module, name) in {("pathlib", "PosixPath"), ("collections", "OrderedDict")}
        if (known and name in self._NAMES) or dtype or path:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not loaded")


def _read_metadata(source: Path) -> Metadata:
    """Read the metadata of a DCP checkpoint. Raises `CheckpointError`."""
    place = source / ".metadata"
    with _told_in_our_words(f"{place} cannot be read", place):
        found = _MetadataUnpickler(io.BytesIO(place.read_bytes())).load()
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{place} holds no metadata of DCP", file=str(place))
        for told in (found.storage_data or {}).values():
            if Path(told.relative_path).name != told.relative_path:
                raise CheckpointError(
                    f"{place}: {told.relative_path!r} is no file beside it", file=str(place)
                )
    return found


class _Reader(FileSystemReader):
    """DCP's own reader, but for how it reads the metadata."""

    def __init__(self, source: Path):
        super().__init__(source)
        self._source = source

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return _read_metadata(self._source)


def import_dcp(source: str | Path, run: str | Path, step: int = 0) -> Path:
    """Make a step of a run out of a DCP checkpoint, optimizer included; returns its folder.

    Names under ``model.`` and ``optimizer.`` are those of ``get_state_dict``; where there is no
    ``model.``, everything is the model's. Needs host memory for all tensors. Raises
    `CheckpointError` for what cannot be read.
    """
    source = Path(source)
    found = _read_metadata(source)
    state: dict[str, Any] = {}
    with _told_in_our_words(f"{source} cannot be read", source):
        for name, told in found.state_dict_metadata.items():
            if isinstance(told, BytesStorageMetadata):
                state[name] = None
            else:
                state[name] = torch.empty(told.size, dtype=told.properties.dtype, device="cpu")
        tensors = {name: value for name, value in state.items() if value is not None}
        others = {name: None for name, value in state.items() if value is None}
        load(tensors, storage_reader=_Reader(source), no_dist=True)
        values = _small_values(source, found, others)
    return _saved(Path(run), step, source.name, tensors, values)


def _small_values(source: Path, found: Metadata, names: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are no tensors, each a ``torch.save``; loaded with ``weights_only``."""
    values = {}
    for index, place in (found.storage_data or {}).items():
        if index.fqn in names:
            with (source / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            values[index.fqn] = torch.load(data, weights_only=True)
    return values


def _saved(
    run: Path, step: int, source: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> Path:
    apart = any(name.startswith("model.") for name in (*tensors, *values))
    held: dict[str, Tensor] = {}
    groups: dict[str, dict[str, Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, value in {**tensors, **values}.items():
        state, group = _STATE.fullmatch(name), _GROUP.fullmatch(name)
        if group is not None:
            groups.setdefault(group[1], {})[group[2]] = value
        elif state is not None and isinstance(value, Tensor):
            held[f"optimizer/{state[2]}/model/{state[1]}"] = value
        elif state is not None:
            numbers.setdefault(f"model/{state[1]}", {})[state[2]] = value
        elif isinstance(value, Tensor):
            held[f"model/{name.removeprefix('model.') if apart else name}"] = value
    described: dict[str, Any] = {"parts": {"model": "weights"}, "optimizers": {}, "values": {}}
    if groups:
        described["parts"]["optimizer"] = "optimizer"
        merged = _merged(groups)
        described["optimizers"]["optimizer"] = {"class": "", "groups": merged, "values": numbers}
    if not held:
        raise ConfigurationError(f"{source} holds no tensors")
    pieces = [piece_of(name, local_part(name, value)) for name, value in held.items()]
    about = About(step, f"imported from DCP, {source}", state=encode(described, "state"))
    return save(run, pieces, about, SoloRanks())


def _merged(told: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups: by number where that is how they were saved, else by equal settings."""
    numbered = [group for group in told.values() if "params" in group]
    if numbered:
        return [
            {**group, "params": [f"model/{name}" for name in group["params"]]} for group in numbered
        ]
    merged: list[dict[str, Any]] = []
    for param, settings in told.items():
        for group in merged:
            if {k: v for k, v in group.items() if k != "params"} == settings:
                group["params"].append(f"model/{param}")
                break
        else:
            merged.append({**settings, "params": [f"model/{param}"]})
    return merged
