# SPDX-License-Identifier: Apache-2.0
"""Ranks that loop over parameters in orders of their own, as over a set."""

import copy

import pytest
import torch
from support.beside import shard, whole
from support.models import seeded
from support.world import on_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch import StateDictType, save_full_weights

pytestmark = pytest.mark.usefixtures("checked_values")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4))


def trained(group, door, seed=0, *, steps=1):
    """A model and an optimizer that has its parameters in an order of this rank's own."""
    model = shard(net(seed), group, door, [nn.Linear])
    params = list(model.parameters())
    turned = params[group.rank() :] + params[: group.rank()]
    optimizer = torch.optim.Adam([{"params": [p], "lr": 0.1} for p in turned])
    for step in range(steps):
        model(torch.full((1, 6), 1.0 + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_right(state):
    """The same in one process, by name."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(whole(state[name][key]), optimizer.state[param][key])


@on_processes(3)
def test_states_of_optimizers_go_by_name_behind_the_wrapper(group):
    model, optimizer = trained(group, "wrapper")
    assert_right(FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    assert_right(FSDP.sharded_optim_state_dict(model, optimizer)["state"])
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        with FSDP.state_dict_type(model, StateDictType[kind]):
            state = FSDP.optim_state_dict(model, optimizer)
            assert_right(state["state"])
            if group.rank():  # the order in which a rank has the entries does not matter either
                state["state"] = dict(reversed(state["state"].items()))
            other, other_optimizer = trained(group, "wrapper", seed=1)
            loaded = FSDP.optim_state_dict_to_load(other, other_optimizer, state)
            other_optimizer.load_state_dict(loaded)
            again = FSDP.optim_state_dict(other, other_optimizer)
            assert_right(again["state"])


@on_processes(3)
def test_states_of_optimizers_go_by_name_behind_the_function(group):
    model, optimizer = trained(group, "function")
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        assert_right(state["state"])
        other, other_optimizer = trained(group, "function", seed=1)
        if full:  # PyTorch's function scatters whole tensors in each rank's own order
            with pytest.raises(ConfigurationError, match="would mix them"):
                set_optimizer_state_dict(other, other_optimizer, state, options=options)
            continue
        set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(state), options=options)
        assert_right(get_optimizer_state_dict(other, other_optimizer)["state"])
    with pytest.raises(ValueError, match=r"(?s)get_optimizer_state_dict.*parameter 0: "):
        optimizer.state_dict()


@on_processes(2)
def test_norms_and_sums_of_different_parameters_are_not_mixed(group):
    """Clipping in one call, whatever the order; in calls of which ranks make different ones."""
    model, _ = trained(group, "function", steps=0)
    model(torch.ones(1, 6)).sum().backward()
    params = list(model.parameters())
    turned = params[group.rank() :] + params[: group.rank()]
    norms = torch._foreach_norm([param.grad for param in turned])
    back = norms[len(norms) - group.rank() :] + norms[: len(norms) - group.rank()]
    plain = net()
    plain(torch.ones(1, 6)).sum().backward()
    expected = [float(param.grad.norm()) for param in plain.parameters()]
    assert [float(norm) for norm in back] == pytest.approx(expected)
    total = nn.utils.clip_grad_norm_(turned, 1e9)
    assert float(total) == pytest.approx(sum(norm**2 for norm in expected) ** 0.5)
    by_rank = [params[:2], params[2:]][:: 1 if group.rank() else -1]
    grad = by_rank[0][0].grad
    for act in (
        lambda: [nn.utils.clip_grad_norm_(each, 1.0) for each in by_rank],
        grad.norm,
        grad.sum,
        grad.max,
        lambda: grad.isnan().any(),
    ):
        with pytest.raises(UsageError, match=r"(?s)this rank takes.*same order"):
            act()
    optimizer = torch.optim.Adam(by_rank[0], lr=0.0)
    optimizer.step()  # of DTensors, for which nothing is sent
    get_optimizer_state_dict(nn.ParameterList(by_rank[0]), optimizer)


def test_a_file_of_weights_whose_entries_differ_is_not_begun(tmp_path):
    def body(comm):
        model = FSDP(seeded(lambda: nn.Linear(3, 2)), comm)
        for name in ("a", "b")[:: -1 if comm.rank else 1]:
            model.module.register_buffer(name, torch.ones(2))
        with pytest.raises(ConfigurationError, match=r"entry \d: "):
            save_full_weights(model, tmp_path / "weights")

    LocalWorld(2).run(body)
    assert not list(tmp_path.iterdir())
