# SPDX-License-Identifier: Apache-2.0
"""Parameters whose tensor class decides what travels in a gather, as float8 weights do.

The protocol is FSDP2's: ``fsdp_pre_all_gather`` turns a shard into what is sent (float8 data, say)
and notes (a scale), ``fsdp_post_all_gather`` makes the full parameter of what has arrived. Such a
parameter lies in a segment of its own. What rests is the class's one inner tensor, plain; its shard
is a flat slice of it, padded like any other, and what is sent must have one element for each.

[Note: Frozen bytes]
A frozen parameter may be of a class of several inner tensors, as data and scales of NF4, int8 or
float8 weights, with or without those hooks. Nobody computes with its parts on the way, so it rests
and travels as the bytes of its inner tensors, one behind the other: a vector of uint8 that is cut,
gathered and stored like any other, bit by bit. The full parameter is the class again, around views
of what has arrived.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from fullshard.core.errors import NotSupportedError
from fullshard.core.layout import Slot, aligned_bytes
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import FlatBuffer
from fullshard.torch.unit.sites import ParamSites


def is_extended(param: Tensor) -> bool:
    """True if the parameter's class has FSDP2's hooks around gathers, or rests as bytes."""
    return _has_hooks(param) or resting_bytes(param) > 0


def _has_hooks(param: Tensor) -> bool:
    return hasattr(param, "fsdp_pre_all_gather") and hasattr(param, "fsdp_post_all_gather")


def resting_bytes(param: Tensor) -> int:
    """Return the bytes of a parameter that rests as such, see [Note: Frozen bytes]; else 0."""
    plain = not hasattr(param, "__tensor_flatten__") or isinstance(
        param, DTensor | ShardedParameter
    )
    if plain or param.requires_grad or (_has_hooks(param) and _is_one_tensor(param)):
        return 0
    inner = [each for _, each in _inner(param)]
    if any(type(each) not in (Tensor, nn.Parameter) for each in inner):
        return 0
    return sum(aligned_bytes(each.numel() * each.element_size()) for each in inner)


def check_trained(name: str, param: Tensor) -> None:
    """Raise `NotSupportedError` for a trained parameter that could only rest as bytes."""
    if param.requires_grad and not _has_hooks(param) and resting_bytes(param.detach()):
        inner = ", ".join(each for each, _ in _inner(param))
        raise NotSupportedError(
            f"parameter {name!r} is trained and a {type(param).__name__}, whose inner tensors "
            f"({inner}) an optimizer cannot step in slices. Freeze it (requires_grad_(False)) "
            "before it is sharded, as for LoRA, or train the plain weight and quantise it in "
            "forward"
        )


def _inner(param: Any) -> Iterator[tuple[str, Tensor]]:
    for name in param.__tensor_flatten__()[0]:
        yield name, getattr(param, name)


def _own_names(param: Tensor) -> list[str]:
    return [name for name, each in _inner(param) if each.shape == param.shape]


def _is_one_tensor(param: Tensor) -> bool:
    """Return True if one inner tensor has the parameter's shape, and others one number at most."""
    others = [each.numel() for _, each in _inner(param) if each.shape != param.shape]
    return len(_own_names(param)) == 1 and all(numel <= 1 for numel in others)


def _as_bytes(param: Tensor) -> Tensor:
    """Return the bytes of the inner tensors, as one vector; views of it start on 32 bytes."""
    parts = [each.detach().contiguous().reshape(-1).view(torch.uint8) for _, each in _inner(param)]
    return torch.cat([pad(each, (0, aligned_bytes(len(each)) - len(each))) for each in parts])


def _of_bytes(template: Any, flat: Tensor) -> Tensor:
    """Make a tensor like ``template`` around views of the bytes of its inner tensors."""
    inner = dict(_inner(template))
    sizes = [each.numel() * each.element_size() for each in inner.values()]
    starts = accumulate(map(aligned_bytes, sizes), initial=0)
    views = {
        name: flat[start : start + size].view(each.dtype).view(each.shape)
        for (name, each), size, start in zip(inner.items(), sizes, starts, strict=False)
    }
    return _made(template, views, template.shape, template.stride())


def put_bytes(param: Any, flat: Tensor) -> None:
    """Let the inner tensors of a parameter that rests as bytes have the values in ``flat``."""
    values = dict(_inner(_of_bytes(param, flat)))
    for name, each in _inner(param):
        each.detach().copy_(values[name])


def _made(template: Any, inner: dict[str, Tensor], shape: Any, stride: Any) -> Tensor:
    context = template.__tensor_flatten__()[1]
    made: Tensor = type(template).__tensor_unflatten__(inner, context, shape, stride)
    return made


def _inner_name(param: Any) -> str:
    """Return the attribute in which the class keeps a tensor of the parameter's shape."""
    if not _is_one_tensor(param):
        inner = ", ".join(f"{name} {tuple(each.shape)}" for name, each in _inner(param))
        raise NotSupportedError(
            f"{type(param).__name__} has fsdp_pre_all_gather but not one inner tensor of its own "
            f"shape, and else only numbers ({inner}); only such classes can be trained sharded. "
            "Freeze the parameter (requires_grad_(False)) before it is sharded, as for LoRA"
        )
    return _own_names(param)[0]


def plain_data(param: Tensor) -> Tensor:
    """Return a parameter's values as a plain tensor; of an extended one, what rests of it."""
    if not is_extended(param):
        return param.detach()
    if resting_bytes(param):
        return _as_bytes(param)
    inner: Tensor = getattr(param, _inner_name(param))
    return inner.detach()


def without_values(param: Tensor) -> Tensor:
    """Make a tensor of the same class, shape and notes whose values take no memory."""
    inner = dict(_inner(param))
    for name in inner if resting_bytes(param) else (_inner_name(param),):
        inner[name] = inner[name].new_zeros(()).expand(inner[name].shape)
    return _made(param, inner, param.shape, param.stride())


class Extension:
    """One such parameter: what it sends, where it arrives, and the full parameter made of it."""

    def __init__(
        self, param: ParamSites, slot: Slot, ranks: Ranks, mp_policy: Any, dtype: torch.dtype
    ):
        self._as_bytes = resting_bytes(param.param) > 0
        self._inner = "" if self._as_bytes else _inner_name(param.param)
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
        inputs: Sequence[Tensor] = (shard,)
        if not self._as_bytes:
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
        inner = dict(_inner(self._template)) | {self._inner: shard.detach()}
        return _made(self._template, inner, shard.shape, shard.stride())

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
        if self._as_bytes:  # whose memory comes and goes, and stays in its place
            known, flat = self.full, self._arrived.flats[0]
            self.full = _of_bytes(self._template, flat[: spec.numel]) if known is None else known
            return known is None
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
