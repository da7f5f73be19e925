# SPDX-License-Identifier: Apache-2.0
"""Refuse modules that use their parameters in ways that sharding would break."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.torch.unit.sites import ParamSites, clean_name


def check_modules(modules: Sequence[nn.Module], params: Iterable[ParamSites]) -> None:
    """Refuse modules below ``modules`` that write to ``params`` in forward, or alias them.

    Raises:
        NotSupportedError: an embedding with ``max_norm``, a TorchScript module.
        ConfigurationError: a buffer in the memory of a parameter.
    """
    by_id = {id(each.param): each.spec.name for each in params}
    memory: dict[int, str] = {}
    for each in params:
        address = _address(each.param)
        if address:
            memory[address] = each.spec.name
    for root in modules:
        for path, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and any(
                id(param) in by_id for param in module.parameters()
            ):
                raise NotSupportedError(
                    f"{clean_name(path) or '(root)'!r} is a TorchScript module, whose parameters "
                    "nobody can replace. Shard the module that it was made of, or leave it out "
                    "(ignored_modules, ignored_params)"
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                _check_embedding(clean_name(path), module, by_id)
            for key, buffer in module._buffers.items():
                address = 0 if buffer is None else _address(buffer)
                if address and address in memory:
                    raise ConfigurationError(
                        f"buffer {clean_name(f'{path}.{key}' if path else key)!r} lies in the "
                        f"memory of parameter {memory[address]!r}, and would keep its first values "
                        "once that is sharded. Make it a copy (.clone()), or use the parameter"
                    )


def _check_embedding(path: str, module: nn.Module, names: dict[int, str]) -> None:
    if getattr(module, "max_norm", None) is not None and id(module.weight) in names:
        raise NotSupportedError(
            f"{type(module).__name__} {path!r} has max_norm, by which forward writes to its "
            "weight; full parameters are dropped after forward, and the change with them. Leave it "
            "out of sharding (ignored_modules, ignored_params), or bound the rows of the output"
        )


def _address(tensor: Tensor) -> int:
    """Return where a plain tensor's memory begins; 0 if it has none, or is of another class."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
