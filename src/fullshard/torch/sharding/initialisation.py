# SPDX-License-Identifier: Apache-2.0
"""First values of parameters: from modules on the meta device, or from the first rank.

[Note: Memory that nobody has written]
A module that was built on the meta device gets memory first and values then, and it is easy to
forget some. So whatever memory floating-point parameters get here is filled with NaN, and looked
through when initialisation should be over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.core.errors import ConfigurationError
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.tensor.tensor_parallel import held_here
from fullshard.torch.unit.plan import Values
from fullshard.torch.unit.sites import ParamSites

_aten = torch.ops.aten
_MAKE_MEMORY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}


class _FillWithNaN(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MAKE_MEMORY and made.is_floating_point() and not made.is_meta:
            made.fill_(float("nan"))
        return made


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Fill new floating-point memory with NaN. See [Note: Memory that nobody has written]."""
    with _FillWithNaN():  # type: ignore[no-untyped-call]
        yield


def initialise(
    modules: Sequence[nn.Module],
    params: Sequence[ParamSites],
    device: torch.device,
    param_init_fn: Callable[[nn.Module], None] | None,
) -> list[ParamSites]:
    """Give those of ``params`` values that are on the meta device; the others stay what they are.

    Every module below ``modules`` that holds one is given to ``param_init_fn``, or else gets memory
    on ``device`` and its ``reset_parameters`` called. Raises `ConfigurationError` if there is no
    such method, or if a parameter is not initialised then. Modules that hold buffers are treated
    alike.
    """
    bare = [each for each in params if each.param.is_meta]
    holders = {id(parameters) for each in bare for parameters, _ in each.sites}
    with filled_with_nan():
        for root in modules:
            for module in list(root.modules()):
                bare_buffers = any(b is not None and b.is_meta for b in module._buffers.values())
                if id(module._parameters) in holders or bare_buffers:
                    _initialise_one(module, device, param_init_fn)
                    for each in bare:
                        _tie_again(each, module)
    for each in bare:
        param = each.shown
        if param.is_meta or (param.is_floating_point() and bool(torch.isnan(param).any())):
            who = "param_init_fn" if param_init_fn is not None else "reset_parameters()"
            raise ConfigurationError(
                f"parameter {each.spec.name!r} came from the meta device, and {who} has not "
                "initialised it: some of its values are not numbers"
            )
    return [replace(each, param=each.shown) if each.param.is_meta else each for each in params]


def _initialise_one(
    module: nn.Module, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None
) -> None:
    if param_init_fn is not None:
        param_init_fn(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise ConfigurationError(
            f"{type(module).__name__} is on the meta device and has no reset_parameters(); "
            "pass param_init_fn, or sync_module_states=True with real values on rank 0"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _tie_again(each: ParamSites, module: nn.Module) -> None:
    """Give the new parameter to every module tied to it."""
    for parameters, key in each.sites:
        if parameters is module._parameters and not parameters[key].is_meta:
            each.put(parameters[key])


def value_of_first_rank(ranks: Ranks, device: torch.device) -> Values:
    """Make a source of the first rank's values; other ranks may be on the meta device.

    Each is broadcast when it is asked for, by all ranks in the same order: a device holds one full
    parameter, not the model.
    """

    def read(each: ParamSites) -> Tensor:
        part, cut = held_here(each.param).detach(), each.tensor_parallel
        sent = _broadcast(part, ranks, device)
        return sent if cut is None else cut.dtensor(sent)

    return read


def broadcast_buffers(modules: Sequence[nn.Module], ranks: Ranks, device: torch.device) -> None:
    """Give the buffers below ``modules`` the values of the first rank. Collective."""
    sent: dict[int, Tensor] = {}
    for root in modules:
        for module in root.modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in sent:
                    sent[id(buffer)] = _broadcast(buffer, ranks, device)
                if buffer.is_meta:
                    module._buffers[key] = sent[id(buffer)]
                else:
                    buffer.copy_(sent[id(buffer)])


def _broadcast(tensor: Tensor, ranks: Ranks, device: torch.device) -> Tensor:
    if tensor.is_meta:
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        sent = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
    ranks.broadcast(sent)
    return sent
