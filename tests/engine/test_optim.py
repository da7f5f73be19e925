# SPDX-License-Identifier: Apache-2.0
"""Optimizers over sharded parameters do what they do over plain ones, or are refused."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fullshard.core.layout import lay_out
from fullshard.core.spec import ParamSpec
from fullshard.torch.local_world import LocalComm, LocalWorld
from fullshard.torch.parameter import Ownership, ShardedParameter

SHAPES = [(5, 7), (), (33,), (1,), (16, 4), (3, 2, 5), (2, 50)]

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
    "adam-amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True, maximize=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
    "adadelta": partial(torch.optim.Adadelta, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "adamax": partial(torch.optim.Adamax, lr=0.1),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "radam": partial(torch.optim.RAdam, lr=0.1),
    "asgd": partial(torch.optim.ASGD, lr=0.1, t0=1, lambd=0.01),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
}
FUSED = {"sgd", "sgd-momentum", "sgd-nesterov", "adam", "adam-amsgrad", "adamw", "adagrad"}
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [(name, form) for name in OPTIMIZERS for form in FORMS if form != "fused" or name in FUSED]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def ownerships(comm: LocalComm) -> list[Ownership]:
    """Those of parameters of SHAPES that lie in one unit."""
    specs = [ParamSpec(f"p{i}", shape, "float32", True) for i, shape in enumerate(SHAPES)]
    (segment,) = lay_out(specs, comm.size).segments
    return [
        Ownership(slot.spec.name, slot.spec.shape, segment.spans(slot), comm)
        for slot in segment.slots
    ]


def sharded(comm: LocalComm, fulls: list[Tensor]) -> list[ShardedParameter]:
    return [
        ShardedParameter.parameter(own.cut(full).clone(), own)
        for own, full in zip(ownerships(comm), fulls, strict=True)
    ]


def set_grads(params: list[ShardedParameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = ShardedParameter.value(param.ownership.cut(grad).clone(), param.ownership)


def train_plain(make, dtype: torch.dtype, steps: int) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values(0, dtype)]
    optimizer = make(params)
    for step in range(steps):
        for param, grad in zip(params, values(step + 1, dtype), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


def train_sharded(make, dtype: torch.dtype, steps: int, world: int) -> list[Tensor]:
    def body(comm: LocalComm) -> list[Tensor]:
        params = sharded(comm, values(0, dtype))
        optimizer = make(params)
        for step in range(steps):
            set_grads(params, values(step + 1, dtype))
            optimizer.step()
        for state in optimizer.state.values():
            for value in state.values():
                assert (
                    not isinstance(value, Tensor)
                    or value.dim() == 0
                    or (type(value) is ShardedParameter)
                )
        return [param.full_tensor() for param in params]

    results = LocalWorld(world).run(body)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_an_optimizer_steps_as_on_plain_parameters(name, form, world):
    make = partial(OPTIMIZERS[name], **FORMS[form])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        want = train_plain(make, dtype, steps=3)
        for got, expected in zip(train_sharded(make, dtype, 3, world), want, strict=True):
            assert torch.equal(got, expected), (dtype, (got - expected).abs().max())
