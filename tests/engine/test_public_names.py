# SPDX-License-Identifier: Apache-2.0
"""Whatever ``torch.distributed.fsdp`` offers is here, with the same parameters, or has a reason."""

import dataclasses
import enum
import inspect

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.sharded_grad_scaler

import fullshard.torch as ours
from fullshard.core.errors import NotSupportedError
from fullshard.torch.comm.protocol import SoloComm

LACKING = {
    "api": "a submodule, which the drop-in stands in for; its names are here",
    "fully_sharded_data_parallel": "as api",
    "sharded_grad_scaler": "as api",
    "wrap": "is fullshard.wrap",
}
MORE = {  # parameters that ours has beyond theirs
    "CPUOffload": {"offload_optimizer"},
    "FullyShardedDataParallel": {"align", "check_values", "compression", "optional_modules"},
    "fully_shard": {"align", "check_values", "compression", "optional"},
}
LATER = {"fully_shard": {"dp_mesh_dims"}}  # theirs has them in later versions than the oldest


def public(namespace):
    return {name: value for name, value in vars(namespace).items() if not name.startswith("_")}


def parameters(function, without=()):
    function = getattr(function, "__func__", function)
    function = inspect.unwrap(function)
    return [
        (p.name, p.kind, p.default is not p.empty)
        for p in inspect.signature(function).parameters.values()
        if p.name not in without
    ]


NAMES = sorted(public(theirs))
METHODS = [
    f"{cls.__name__}.{name}"
    for cls in (theirs.FullyShardedDataParallel, theirs.FSDPModule, theirs.UnshardHandle)
    for name, value in sorted(public(cls).items())
    if callable(getattr(cls, name)) or isinstance(value, property)
]


@pytest.mark.parametrize("name", NAMES)
def test_name(name):
    if name in LACKING:
        assert not hasattr(ours, name)
        return
    assert hasattr(ours, name)  # __all__ has those that people should know first
    mine, other = getattr(ours, name), getattr(theirs, name)
    extra = MORE.get(name, set())
    if inspect.isclass(other) and issubclass(other, enum.Enum):
        assert {each.name for each in other} <= set(mine.__members__)
    elif dataclasses.is_dataclass(other):
        fields = [f.name for f in dataclasses.fields(mine) if f.name not in extra]
        assert fields == [f.name for f in dataclasses.fields(other)]
    elif inspect.isfunction(other):
        extra = extra | LATER.get(name, set()) - inspect.signature(other).parameters.keys()
        assert parameters(mine, extra) == parameters(other)
    elif name == "FullyShardedDataParallel":
        assert parameters(mine.__init__, extra) == parameters(other.__init__)
    else:
        assert inspect.isclass(mine)


@pytest.mark.parametrize("name", METHODS)
def test_method(name):
    cls, method = name.split(".")
    if name in LACKING:
        assert not hasattr(getattr(ours, cls), method)
        return
    mine = inspect.getattr_static(getattr(ours, cls), method)
    other = inspect.getattr_static(getattr(theirs, cls), method)
    assert type(mine) is type(other)
    if not isinstance(other, property) and method not in ("named_buffers", "named_parameters"):
        assert parameters(mine) == parameters(other)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("set_all_gather_layout", [object()], "arrives in its place"),
        ("set_reduce_scatter_input_fn", [print], "the engine packs"),
    ],
)
def test_names_of_later_versions_are_refused_with_a_way_out(name, arguments, why):
    module = ours.fully_shard(torch.nn.Linear(2, 2), mesh=SoloComm())
    with pytest.raises(NotSupportedError, match=rf"{name}\(\) of PyTorch's FSDP2 .*{why}"):
        getattr(module, name)(*arguments)


def test_no_gradient_is_one_of_later_versions_that_waits():
    assert not isinstance(torch.ones(1), ours.FSDPGrad)
    with pytest.raises(NotSupportedError, match=r"FSDPGrad.* in no parameter's \.grad"):
        ours.FSDPGrad(None, None, None)


def test_a_dtype_for_each_parameter_is_refused_with_a_way_out():
    with pytest.raises(NotSupportedError, match=r"param_dtype_override_fn .* shard modules"):
        ours.MixedPrecisionPolicy(param_dtype_override_fn=lambda name, param: None)


def test_every_reason_is_needed():
    assert set(LACKING) <= {*NAMES, *METHODS}
