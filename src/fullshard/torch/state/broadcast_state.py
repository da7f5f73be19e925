# SPDX-License-Identifier: Apache-2.0
"""Broadcast of optimizer state from the first rank to all, tensor by tensor."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.comm.texts import broadcast_bytes
from fullshard.torch.state.optimizers import cut_state
from fullshard.torch.tensor.parameter import ShardedParameter

_TENSOR = "tensor"


def broadcast_state(
    ranks: Ranks, saved: Mapping[str, Any], params: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Send the first rank's ``saved`` to all ranks, which keep their spans of it. Collective.

    ``saved`` has ``state`` (by the names of ``params``) and ``param_groups``, made of tensors,
    numbers, texts, dicts, lists and tuples. One tensor at a time is whole, on ``device``; nothing
    is pickled. Raises `ConfigurationError` on all ranks for values of another kind.
    """
    tensors: list[Tensor] = []

    def note(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}

    text, failure = "", None
    if ranks.first:
        try:
            text = json.dumps(to_json(saved, note, "state"))
        except ConfigurationError as error:
            failure = error
    if ranks.any(failure is not None, device):
        raise ConfigurationError(
            f"the optimizer's state cannot be sent: {failure or 'the error is on the first rank'}"
        )
    data = text.encode()
    for comm in (ranks.replicas, ranks.gather):
        data = broadcast_bytes(comm, data, device)
    described = from_json(json.loads(data))
    sent = iter(tensors)

    def receive(dtype: str, shape: list[int]) -> Tensor:
        if ranks.first:
            tensor = next(sent).detach().to(device, copy=True).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        ranks.broadcast(tensor)
        return tensor

    state: dict[str, Any] = {}
    for name, values in described["state"].items():
        state[name] = {}
        for key, value in values.items():
            one = {key: _restored(value, receive)}
            param = params.get(name)
            state[name] |= cut_state(one, param) if isinstance(param, ShardedParameter) else one
    return {"state": state, "param_groups": _restored(described["param_groups"], receive)}


def _restored(value: Any, receive: Callable[[str, list[int]], Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_restored(item, receive) for item in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {_TENSOR}:
        tensor = receive(*value[_TENSOR])
        return tensor.cpu() if tensor.dim() == 0 else tensor
    return {key: _restored(item, receive) for key, item in value.items()}
