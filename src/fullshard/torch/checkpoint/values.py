# SPDX-License-Identifier: Apache-2.0
"""Values beside the model: small tensors as JSON, and the random state of all ranks."""

import json
import random
from typing import Any

import numpy
import torch
from torch import Tensor

from fullshard.checkpoint.format.values import from_json, to_json
from fullshard.core.errors import ConfigurationError
from fullshard.torch.checkpoint.tensors import DTYPES
from fullshard.torch.state.weights_file import DTYPE_NAMES

TENSOR = "fullshard.tensor"  # the key by which an encoded tensor is known
MOST_BYTES = 2**20


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON, small tensors too. Raises `ConfigurationError` that names the place."""
    return to_json(value, _other, where)


def _other(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().cpu().contiguous()
    size_bytes = plain.numel() * plain.element_size()
    if size_bytes > MOST_BYTES or type(plain) not in (Tensor, torch.nn.Parameter):
        raise ConfigurationError(
            f"a {type(value).__name__} of {size_bytes} bytes is too much for what is kept beside "
            "the tensors; give it as (part of) a model"
        )
    data = plain.view(-1).view(torch.uint8).numpy().tobytes()
    return {TENSOR: DTYPE_NAMES[plain.dtype], "shape": tuple(plain.shape), "data": data}


def decode(value: Any) -> Any:
    """Invert `encode`; numpy's arrays come as tensors."""
    return _with_tensors(from_json(value))


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {TENSOR, "shape", "data"} and value[TENSOR] in DTYPES:
            if not value["data"]:
                return torch.empty(value["shape"], dtype=DTYPES[value[TENSOR]], device="cpu")
            data = torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8)
            return data.view(DTYPES[value[TENSOR]]).view(value["shape"]).clone()
        return {key: _with_tensors(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_tensors, value))
    return value


def random_state() -> Tensor:
    """This rank's generators as JSON in uint8: Python's, numpy's, torch's, the GPU's."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    state = {
        "python": [version, numpy.asarray(words, numpy.uint32).tobytes(), gauss],
        "numpy": [kind, numpy.asarray(keys).tobytes(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes() if _on_cuda() else None,
    }
    text = json.dumps(encode(state, "random state")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def set_random_state(tensor: Tensor) -> None:
    """Set what `random_state` returned. A GPU's is left alone where there is none."""
    state = decode(json.loads(tensor.numpy().tobytes()))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(numpy.frombuffer(words, numpy.uint32).tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    if state["cuda"] is not None and _on_cuda():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8))


def _on_cuda() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized
