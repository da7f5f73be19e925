# SPDX-License-Identifier: Apache-2.0
"""Parameters whose tensor class decides what travels in a gather, as float8 weights do.

The protocol is FSDP2's: ``fsdp_pre_all_gather`` turns a shard into what is sent (float8 data, say)
and notes (a scale), ``fsdp_post_all_gather`` makes the full parameter of what has arrived. Such a
parameter lies in a segment of its own. What rests is the class's one inner tensor, plain; its shard
is a flat slice of it, padded like any other, and what is sent must have one element for each.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.core.errors import NotSupportedError
from fullshard.core.layout import Slot
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.sites import ParamSites

__all__ = ["Extension", "is_extended", "plain_data", "without_values"]


def is_extended(param: Tensor) -> bool:
    """True if the parameter's class has FSDP2's hooks around gathers."""
    return hasattr(param, "fsdp_pre_all_gather") and hasattr(param, "fsdp_post_all_gather")


def _inner_name(param: Any) -> str:
    """Return the attribute in which the class keeps a tensor of the parameter's shape."""
    attributes, _ = param.__tensor_flatten__()
    names = [name for name in attributes if getattr(param, name).shape == param.shape]
    if len(names) != 1:
        raise NotSupportedError(
            f"{type(param).__name__} has fsdp_pre_all_gather but not one inner tensor of its own "
            f"shape ({names}); only such classes can be sharded by element"
        )
    return str(names[0])


def plain_data(param: Tensor) -> Tensor:
    """Return a parameter's values as a plain tensor; of an extended one, the inner tensor."""
    if not is_extended(param):
        return param.detach()
    inner: Tensor = getattr(param, _inner_name(param))
    return inner.detach()


def without_values(param: Tensor) -> Tensor:
    """Make a tensor of the same class, shape and notes whose values take no memory."""
    attributes, context = param.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(param, name) for name in attributes}
    data = inner[_inner_name(param)]
    inner[_inner_name(param)] = data.new_zeros(()).expand(data.shape)
    made = type(param).__tensor_unflatten__(  # type: ignore[attr-defined]
        inner, context, param.shape, param.stride()
    )
    assert isinstance(made, Tensor)
    return made


class Extension:
    """One such parameter: what it sends, where it arrives, and the full parameter made of it."""

    def __init__(
        self, param: ParamSites, slot: Slot, ranks: Ranks, mp_policy: Any, dtype: torch.dtype
    ):
        self._inner = _inner_name(param.param)
        self._template = param.param
        self._slot = slot
        self._slices = ranks.gather.size
        self._mesh = ranks.mesh_of_slices
        self._module = param.module
        self._mp_policy = mp_policy
        self._dtype = dtype  # of computation
        self._arrived: FlatBuffer | None = None
        self._notes: Any = None
        self.full: Tensor | None = None
        # Memory of the full parameter that the class made beside what arrived, and its bytes.
        self._made: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def bytes(self) -> int:
        """The bytes of what has arrived and is still held, and of what was made of it."""
        arrived = self._arrived is not None and self._arrived.allocated
        held = self._arrived.bytes if self._arrived is not None and arrived else 0
        return held + sum(storage.nbytes() for storage, _ in self._made)

    def send(self, shard: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Make the pairs for `Comm.all_gather` from this rank's slice."""
        inputs, self._notes = self._call_before(self._of_slice(shard))
        for each in inputs:
            if each.numel() != shard.numel():
                raise NotSupportedError(
                    f"parameter {self._slot.spec.name!r}: fsdp_pre_all_gather gave "
                    f"{each.numel()} elements for {shard.numel()}; one for each is supported"
                )
        if self._arrived is None:
            sizes = [(each.numel() * self._slices, each.dtype) for each in inputs]
            self._arrived = FlatBuffer(sizes, shard.device)
        self._arrived.allocate()
        return [
            (flat, each.contiguous().view(-1))
            for flat, each in zip(self._arrived.flats, inputs, strict=True)
        ]

    def _of_slice(self, shard: Tensor) -> Any:
        attributes, context = self._template.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(self._template, name) for name in attributes}
        inner[self._inner] = shard.detach()
        return type(self._template).__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, shard.shape, shard.stride()
        )

    def _call_before(self, local: Any) -> tuple[Sequence[Tensor], Any]:
        hook = local.fsdp_pre_all_gather
        if len(inspect.signature(hook).parameters) == 1:
            result = hook(self._mesh)
        else:
            shape = torch.Size(self._slot.spec.shape)
            stride = torch.empty(shape, device="meta").stride()
            result = hook(self._mesh, shape, stride, self._module, self._mp_policy)
        inputs, notes = result
        return inputs, notes

    def receive(self) -> bool:
        """Make the full parameter of what has arrived; return True if it is a new object."""
        assert self._arrived is not None
        spec = self._slot.spec
        outputs = tuple(flat[: spec.numel].view(spec.shape) for flat in self._arrived.flats)
        after = self._template.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self.full is not None:
            for storage, size in self._made:
                storage.resize_(size)
            after(outputs, self._notes, self._dtype, out=self.full)
            return False
        self.full, inner = after(outputs, self._notes, self._dtype)
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in inner}
        storages.pop(self._arrived.memory.untyped_storage()._cdata, None)
        self._made = [(storage, storage.nbytes()) for storage in storages.values()]
        return True

    def release(self) -> None:
        """Give back the memory of what has arrived, and of what the class made of it."""
        if self._arrived is not None:
            self._arrived.release()
        for storage, _ in self._made:
            storage.resize_(0)
