# SPDX-License-Identifier: Apache-2.0
"""Broadcast of optimizer state from the first rank to all, tensor by tensor."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.state.optimizers import cut_state
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["broadcast_state"]

_TENSOR, _TUPLE = "tensor", "tuple"
_PLAIN = (str, int, float, bool, type(None))


def broadcast_state(
    ranks: Ranks, given: Mapping[str, Any], params: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Send the first rank's ``given`` to all ranks, which keep their spans of it. Collective.

    ``given`` has ``state`` (by the names of ``params``) and ``param_groups``, made of tensors,
    numbers, texts, dicts, lists and tuples. One tensor at a time is whole, on ``device``; nothing
    is pickled. Raises `ConfigurationError` on all ranks for values of another kind.
    """
    tensors: list[Tensor] = []
    text, failure = "", None
    if ranks.first:
        try:
            text = json.dumps(_described(given, tensors))
        except ConfigurationError as error:
            failure = error
    if ranks.any(failure is not None, device):
        raise ConfigurationError(
            f"the optimizer's state cannot be sent: {failure or 'the error is on the first rank'}"
        )
    described = json.loads(_text_of_first(ranks, text, device))
    sent = iter(tensors)

    def receive(dtype: str, shape: list[int]) -> Tensor:
        if ranks.first:
            tensor = next(sent).detach().to(device, copy=True).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        ranks.broadcast(tensor)
        return tensor

    state: dict[str, Any] = {}
    for name, each in described["state"].items():
        state[name] = {}
        for key, value in each.items():
            one = {key: _restored(value, receive)}
            param = params.get(name)
            state[name] |= cut_state(one, param) if isinstance(param, ShardedParameter) else one
    return {"state": state, "param_groups": _restored(described["param_groups"], receive)}


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Describe ``value`` for JSON, and collect its tensors, which are only named there."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, tuple):
        return {_TUPLE: [_described(each, tensors) for each in value]}
    if isinstance(value, list):
        return [_described(each, tensors) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _described(each, tensors) for key, each in value.items()}
    if isinstance(value, _PLAIN):
        return value
    raise ConfigurationError(f"it holds a {type(value).__name__}: {value!r}")


def _restored(value: Any, receive: Callable[[str, list[int]], Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(each, receive) for each in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        tensor = receive(*value[_TENSOR])
        return tensor.cpu() if tensor.dim() == 0 else tensor
    if set(value) == {_TUPLE}:
        return tuple(_restored(each, receive) for each in value[_TUPLE])
    return {key: _restored(each, receive) for key, each in value.items()}


def _text_of_first(ranks: Ranks, text: str, device: torch.device) -> str:
    data = bytearray(text.encode())
    size = torch.tensor([len(data)], device=device)
    ranks.broadcast(size)
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if ranks.first:
        buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
    ranks.broadcast(buffer)
    return bytes(buffer.tolist()).decode()
