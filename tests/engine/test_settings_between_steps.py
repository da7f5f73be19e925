# SPDX-License-Identifier: Apache-2.0
"""What users set, summon, compile and wrap around a sharded model is right, or named."""

import contextlib
import math
from collections import OrderedDict, defaultdict

import pytest
import torch
from support.beside import grads_of, params_of, shard
from support.models import seeded
from support.sampling import survey
from support.threads import on_ranks
from support.world import on_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Optimizer

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.core.strategy import Prefetch
from fullshard.testing import LocalWorld
from fullshard.torch import set_prefetch, summon_full_params
from fullshard.torch.step.managed import managed_unit_of


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


X = torch.arange(6.0).view(2, 3) / 6


def sharded(comm, door, align, model=None):
    return shard(net() if model is None else model, comm, door, align=align)


both_doors = pytest.mark.parametrize("door", ["wrapper", "function"])
both_layouts = pytest.mark.parametrize("align", ["row", "element"])


class Chunked(nn.Module):
    """Calls its head in chunks, and chooses for each what is kept, as losses in chunks do."""

    def __init__(self, choose=lambda head, last: None):
        super().__init__()
        self.body, self.head, self.choose = net(), seeded(lambda: nn.Linear(3, 5), 1), choose

    def forward(self, x):
        hidden, total = self.body(x), 0.0
        for number, part in enumerate(hidden.chunk(2)):
            self.choose(self.head, number == 1)
            total = total + self.head(part).square().sum()
        return total


def keep_until_last(head, last):
    head.set_reshard_after_forward(last)
    head.set_reshard_after_backward(last)


@both_layouts
@on_ranks(2)
def test_resharding_may_be_chosen_in_the_step_of_others(comm, align):
    model, plain = Chunked(keep_until_last), Chunked()
    shard(model, comm, units=("body", "head"), align=align)
    for _ in range(3):
        loss = model(X)
        model.head.set_reshard_after_backward(False)
        model.head.set_reshard_after_forward(False)
        loss.backward()
        plain(X).backward()
        torch.testing.assert_close(grads_of(model), grads_of(plain))
    model.choose = lambda head, last: head.set_reshard_after_forward(True)
    model.head.register_forward_pre_hook(lambda head, _: head.set_reshard_after_forward(False))
    with pytest.raises(UsageError, match="unit 'head' cannot be changed while"):
        model(X)


@both_doors
@both_layouts
@on_ranks(2)
def test_what_was_changed_before_an_error_in_summon_stays_changed(comm, door, align):
    model = sharded(comm, door, align)
    with contextlib.suppress(KeyError), summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
        raise KeyError("of the user's own")
    assert all(bool((p.full_tensor() == 0.5).all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("set_gradient_divide_factor", math.inf),
        ("set_gradient_divide_factor", math.nan),
        ("set_gradient_divide_factor", "2"),
        ("set_gradient_divide_factor", -1.0),
        ("set_reshard_after_forward", "no"),
        ("set_reshard_after_forward", 2),
        ("set_reshard_after_backward", None),
        ("set_unshard_in_backward", "no"),
        ("set_requires_gradient_sync", "no"),
        ("set_requires_all_reduce", "no"),
        ("set_is_last_backward", "no"),
    ],
)
@on_ranks(1)
def test_settings_of_another_type_are_named(comm, setting, value):
    model = sharded(comm, "function", "row")
    with pytest.raises(ConfigurationError, match="must be"):
        getattr(model, setting)(value)


@both_doors
def test_torchscript_modules_are_named(door):
    with pytest.warns(
        (DeprecationWarning, FutureWarning), match="jit.script"
    ):  # the latter: torch 2.14
        script = torch.jit.script(nn.Linear(3, 4))

    def body(comm):
        with pytest.raises(NotSupportedError, match="'0' is a TorchScript module"):
            sharded(comm, door, "row", nn.Sequential(script, nn.Tanh()))

    LocalWorld(1).run(body)


class Lookahead(Optimizer):
    """Wraps an optimizer as libraries do, without `Optimizer.__init__`."""

    def __init__(self, optimizer):
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), {}
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = defaultdict(dict), {}
        self._patch_step_function()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["slow"] = param.detach().clone()

    def step(self, closure=None):
        self.optimizer.step()
        with torch.no_grad():
            for param, state in self.state.items():
                state["slow"].lerp_(param, 0.5)
                param.copy_(state["slow"])


@both_doors
@both_layouts
@on_ranks(2)
def test_optimizers_that_wrap_others_step_as_on_one_process(comm, door, align):
    model, plain = sharded(comm, door, align), net()
    ours = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1))
    theirs = Lookahead(torch.optim.AdamW(plain.parameters(), lr=0.1))
    for _ in range(3):
        model(X).square().sum().backward()
        plain(X).square().sum().backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(params_of(model), params_of(plain))
    assert ours.optimizer.state_dict()["state"]


@pytest.mark.parametrize(("all_of_it", "align"), [(True, "row"), survey((False, "element"))])
@on_processes(2)
def test_state_of_compiled_models_goes_by_pytorchs_names(group, align, all_of_it):
    model = net()
    if all_of_it:
        model = torch.compile(model, backend="eager")
    else:
        model[0] = torch.compile(model[0], backend="eager")
    model = sharded(group, "function", align, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    moments = {name: state["state"][name]["exp_avg"].full_tensor() for name in names}
    assert sorted(state["state"]) == names
    assert sorted(name.replace("_orig_mod.", "") for name in weights) == names
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    again = get_state_dict(model, optimizer)[1]["state"]
    assert again.keys() == set(names)
    assert all(torch.equal(again[name]["exp_avg"].full_tensor(), moments[name]) for name in names)


@both_doors
@both_layouts
@on_processes(2)
def test_dtensors_put_into_a_summoned_model_are_written_back(group, door, align):
    inner = net()
    model = sharded(group, door, align, inner)
    with summon_full_params(model):
        weight = inner[0].weight.detach() * 2
        mesh = init_device_mesh("cpu", (2,))
        inner[0].weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        inner[2].bias = nn.Parameter(inner[2].bias.detach() + 1)
    assert torch.equal(inner[0].weight.full_tensor(), net()[0].weight * 2)
    assert torch.equal(inner[2].bias.full_tensor(), net()[2].bias + 1)
    model(X).sum().backward()


def test_the_number_of_reduces_leaves_what_is_gathered_ahead_as_it_was():
    def body(comm):
        model = sharded(comm, "function", "row")
        set_prefetch(model, 2, 3, least_bytes=100)
        model.set_reduce_scatter_max_input_buffers(4)
        model(X).sum().backward()
        return managed_unit_of(model).tracker.prefetch

    assert LocalWorld(2).run(body) == [Prefetch(2, 3, 4, 100)] * 2
