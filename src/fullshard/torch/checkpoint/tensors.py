# SPDX-License-Identifier: Apache-2.0
"""This rank's part of a tensor of any kind: boxes, and the memory that they fill.

This is all that checkpoints know about how parameters are sharded.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fullshard.checkpoint.conversion import refuse_lost_numbers
from fullshard.checkpoint.format.tiling import Slicing, Tile
from fullshard.checkpoint.shards import Piece
from fullshard.core.boxes import Box, boxes_of_interval
from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.layout import SpansOfRanks
from fullshard.torch.state.weights_file import DTYPE_NAMES
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.extensions import plain_data, put_bytes, resting_bytes

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class LocalPart:
    """This rank's part of a tensor of global ``shape``.

    ``local`` has the elements of ``boxes``, one box after the other in row-major order. ``fresh``:
    it was made to be loaded into, and belongs to nothing yet. ``tile`` is the part of a rule that
    the boxes are, None if the tensor has none.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    local: Tensor
    fresh: bool = False
    tile: Tile | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def memory(self, dtype: str) -> memoryview | None:
        """The memory of ``local``, if values of that dtype can be read straight into it."""
        local = self.local.detach()
        if local.device.type != "cpu" or not local.is_contiguous() or DTYPES[dtype] != local.dtype:
            return None
        return local.view(-1).view(torch.uint8).numpy().data

    def note_change(self) -> None:
        """Tell whoever looks at versions that ``local`` was written to."""
        count_change(self.local)

    @property
    def dtype(self) -> str:
        """The name that safetensors has for the dtype of ``local``."""
        return DTYPE_NAMES[self.local.dtype]

    def refuse_lost(self, name: str, data: memoryview, dtype: str) -> None:
        """Raise `CheckpointError` if numbers in ``data``, of that dtype, do not fit ``local``."""
        values = torch.frombuffer(data, dtype=DTYPES[dtype])
        values = values.double() if values.is_floating_point() else values
        refuse_lost_numbers(name, dtype, self.dtype, values.numpy())

    def fill(self, start: int, data: memoryview, dtype: str) -> None:
        """Set the elements from ``start`` on to ``data``, which has the dtype of that name."""
        values = torch.frombuffer(data, dtype=DTYPES[dtype])
        local = self.local.detach()
        if local.is_contiguous():
            local.view(-1)[start : start + values.numel()].copy_(values)
        else:  # element by element in row-major order, through a copy
            flat = local.contiguous().view(-1)
            flat[start : start + values.numel()].copy_(values)
            local.copy_(flat.view(local.shape))
        self.note_change()


@dataclass(frozen=True)
class _BytesPart(LocalPart):
    """A parameter of a plain model as the bytes that it rests as, where it is sharded."""

    of: Any = None

    def note_change(self) -> None:
        """Let the parameter have what was written to its bytes."""
        put_bytes(self.of, self.local)


KnownBoxes = dict[tuple[Any, ...], tuple[DeviceMesh, tuple[Box, ...], Tile | None]]
"""This rank's boxes by shape, mesh and placements: most tensors have those of another one.

The mesh stands beside them, so that it lives and its identity stays its own.
"""


def local_part(name: str, value: Tensor, known: KnownBoxes | None = None) -> LocalPart:
    """Describe this rank's part of ``value``.

    Raises `ConfigurationError` for tensors without values and `NotSupportedError` for kinds that
    have no boxes; ``name`` is for the message. ``known`` is looked at first, and added to.
    """
    if value.is_meta:
        raise ConfigurationError(
            f"{name!r} is on the meta device and has no values; call to_empty on the model first"
        )
    if value.dtype not in DTYPE_NAMES:
        raise NotSupportedError(f"{name!r} is {value.dtype}, which safetensors files cannot hold")
    if isinstance(value, ShardedParameter):
        return _of_sharded(name, value)
    if resting_bytes(value):
        flat = plain_data(value)
        return _BytesPart(tuple(flat.shape), _whole(flat.shape), flat, tile=Tile((), 0), of=value)
    if isinstance(value, DTensor):
        local = value.to_local()
        shape, mesh, placements = tuple(value.shape), value.device_mesh, tuple(value.placements)
        known = {} if known is None else known
        key = (shape, id(mesh), placements)
        if key not in known:
            boxes = _box_of(name, shape, mesh, placements)
            known[key] = mesh, boxes, _tile_of(shape, mesh, placements)
        _, boxes, tile = known[key]
        return LocalPart(shape, boxes if local.numel() else (), local, tile=tile)
    if value.layout is not torch.strided:
        raise NotSupportedError(f"{name!r} is sparse ({value.layout}); store a dense tensor")
    shape = tuple(value.shape)
    return LocalPart(shape, _whole(shape), value, tile=Tile((), 0))


def _of_sharded(name: str, value: ShardedParameter) -> LocalPart:
    ownership, span = value.ownership, value.span
    cut = ownership.tensor_parallel
    local = value.local
    if ownership.dim:
        local = ownership.rows(local)
        before = span.start // max(1, math.prod(local.shape) // max(1, local.shape[ownership.dim]))
        offsets = [0] * local.dim()
        offsets[ownership.dim] = before
        inside = [Box(tuple(offsets), tuple(local.shape))] if local.numel() else []
    else:
        inside = boxes_of_interval(ownership.part_shape, span.start, span.stop)
    tile = _tile_of_span(ownership)
    if cut is None:
        return LocalPart(ownership.shape, tuple(inside), local, tile=tile)
    outer = _box_of(name, ownership.shape, cut.mesh, cut.placements)
    at = outer[0].offsets if outer else (0,) * len(ownership.shape)
    moved = [box.moved(at) for box in inside]
    outer_tile = _tile_of(ownership.shape, cut.mesh, cut.placements)
    if tile is not None and outer_tile is not None:
        index = outer_tile.index * ownership.comm.size + tile.index
        tile = Tile(outer_tile.slicings + tile.slicings, index)
    return LocalPart(ownership.shape, tuple(moved), local, tile=tile if outer_tile else None)


def _tile_of_span(ownership: Ownership) -> Tile | None:
    """This rank's part of the rule by which a unit's segment is cut."""
    spans, shape, dim = ownership.spans, ownership.part_shape, ownership.dim
    if not isinstance(spans, SpansOfRanks):
        return None
    row = math.prod(shape[:dim] + shape[dim + 1 :]) if dim else 1
    if not row or spans.slice_numel % row or spans.start % row or not spans.slice_numel:
        return None
    slicing = Slicing(dim or None, spans.start // row, spans.slice_numel // row, spans.shards)
    return Tile((slicing,), ownership.comm.rank)


def _tile_of(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Tile | None:
    """This rank's part of the rule by which a mesh cuts a tensor; None if no such rule is known."""
    slicings, index, lengths = [], 0, list(shape)
    for dim, placement in enumerate(placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or not lengths[placement.dim]:
            return None
        parts, along = mesh.size(dim), placement.dim % len(shape)
        size = -(-lengths[along] // parts)
        if size * parts != lengths[along] and len(placements) > 1:
            return None  # what the next dims of the mesh cut is not alike everywhere
        slicings.append(Slicing(along, 0, size, parts))
        index = index * parts + mesh.get_local_rank(dim)
        lengths[along] = size
    return Tile(tuple(slicings), index)


def _box_of(
    name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[Box, ...]:
    if any(placement.is_partial() for placement in placements):
        raise NotSupportedError(
            f"{name!r} is a sum that is not taken yet ({placements}); redistribute it first"
        )
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if 0 in sizes:
        return ()
    return (Box(tuple(offsets), tuple(sizes)),)


def _whole(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return () if 0 in shape else (Box((0,) * len(shape), shape),)


class TensorSource:
    """The bytes of a tensor, in row-major order, on any device."""

    def __init__(self, local: Tensor):
        self._bytes = local.detach().contiguous().view(-1).view(torch.uint8)

    def copy_into(self, view: memoryview, start: int) -> None:
        """Copy from the tensor; waits for the device."""
        target = torch.frombuffer(view, dtype=torch.uint8)
        target.copy_(self._bytes[start : start + view.nbytes])


def piece_of(name: str, held: LocalPart) -> Piece:
    """Make a piece to write of it."""
    source = TensorSource(held.local if held.boxes else held.local.new_empty(0))
    return Piece(name, held.shape, DTYPE_NAMES[held.local.dtype], held.boxes, source, held.tile)
