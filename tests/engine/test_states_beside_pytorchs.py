# SPDX-License-Identifier: Apache-2.0
"""State dicts of ranks that are processes: their entries, files, and PyTorch's own beside."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from support.beside import DOORS, shard
from support.models import GPT, Block
from support.sampling import survey
from support.world import on_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TheirPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

import fullshard.torch as ours
from fullshard.torch import ShardedParameter, StateDictType


class Odd(nn.Module):
    """Rows that no number of ranks divides, a number, nothing, low precision, frozen, a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 3)
        self.conv = nn.Conv1d(5, 11, 2)
        self.low = nn.Linear(3, 5, dtype=torch.bfloat16)
        self.number = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(4, 0))
        self.frozen = nn.Parameter(torch.randn(2, 3), requires_grad=False)
        self.tied = nn.Linear(3, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.register_buffer("count", torch.tensor([3, 4]))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("size", [3, 4])
@on_processes("size")
def test_entries_are_dtensors(group, size, door):
    """And loading each kind of them gives it back."""
    plain = Odd().state_dict()
    model = shard(Odd(), group, door)
    state = get_model_state_dict(model)
    assert list(state) == list(plain)
    for name, value in state.items():
        if name == "count":
            assert torch.equal(value, plain[name])
            continue
        assert isinstance(value, DTensor)
        assert value.shape == plain[name].shape
        assert value.dtype == plain[name].dtype
        like = distribute_tensor(plain[name], value.device_mesh, value.placements)
        assert torch.equal(value.to_local(), like.to_local()), name
        assert torch.equal(value.full_tensor(), plain[name]), name
    assert state["tied.weight"] is state["embed.weight"]
    assert state["number"].placements == (Replicate(),)
    mesh = state["conv.weight"].device_mesh
    columns = distribute_tensor(plain["conv.weight"] + 3, mesh, [Shard(1)])
    kinds = {
        "rows": {k: v + 1 for k, v in state.items()},
        "whole": {k: v + 2 for k, v in plain.items()},
        "columns": {**plain, "conv.weight": columns},
        "replicated": {**plain, "conv.weight": columns.redistribute(placements=[Replicate()])},
    }
    wanted = {"rows": 1, "whole": 2, "columns": 3, "replicated": 3}
    for kind, values in kinds.items():
        model.load_state_dict(values)
        loaded = model.get_parameter("conv.weight")
        assert isinstance(loaded, ShardedParameter)
        assert torch.equal(loaded.full_tensor(), plain["conv.weight"] + wanted[kind]), kind
    # Rows share the parameters' memory; other DTensors have their own, and did not follow.
    now = plain["conv.weight"] + (3 if door == "function" else 0)
    assert torch.equal(state["conv.weight"].full_tensor(), now)


@on_processes(2)
def test_a_wrapper_inside_a_plain_module(group):
    """Whole for a script, DTensors for PyTorch's functions, also through a module around it."""
    plain = Odd().state_dict()
    outer = nn.Sequential(shard(Odd(), group, "wrapper"))
    assert torch.equal(outer.state_dict()["0.conv.weight"], plain["conv.weight"])
    state = get_model_state_dict(outer)
    assert list(state) == [f"0.{name}" for name in plain]
    assert type(state["0.conv.weight"]) is DTensor
    set_model_state_dict(outer, {name: value + 1 for name, value in state.items()})
    assert torch.equal(outer.state_dict()["0.conv.weight"], plain["conv.weight"] + 1)


# ---- ours and theirs ----------------------------------------------------------------------------


def _gpt():
    torch.manual_seed(1)
    return GPT(
        tied=False
    ).double()  # a key's bias has no gradient but rounding, which Adam blows up


def train_ours(group, door):
    return _trained(group, shard(_gpt(), group, door, [Block]))


def train_theirs(group, door):
    model = _gpt()
    if door == "function":
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            theirs.fully_shard(block, mesh=mesh)
        return _trained(group, theirs.fully_shard(model, mesh=mesh))
    return _trained(
        group,
        theirs.FullyShardedDataParallel(
            model,
            group,
            auto_wrap_policy=TheirPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        ),
    )


def _trained(group, model):
    """The model and an optimizer with two groups, after two steps."""
    heads = [p for n, p in model.named_parameters() if "head" in n]
    others = [p for n, p in model.named_parameters() if "head" not in n]
    groups = [{"params": others}, {"params": heads, "lr": 3e-3, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for number in range(2):
        step(group, model, optimizer, number)
    return model, optimizer


def step(group, model, optimizer, number):
    """Of the rank's own batch; returns the loss."""
    torch.manual_seed(100 * number + group.rank())
    tokens = torch.randint(17, (3, 6))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _whole(values):
    """Any state dict with plain tensors in place of DTensors. Collective."""

    def plain(value):
        assert not isinstance(value, ShardedParameter) or isinstance(value, DTensor), "leaked out"
        return value.detach().full_tensor() if isinstance(value, DTensor) else value

    return tree_map(plain, values)


def _compare(mine, other):
    """Assert that two states of any form are equal, tensors within 1e-9."""
    mine, other = (tree_flatten_with_path(each)[0] for each in (mine, other))
    mine, other = (sorted((keystr(path), leaf) for path, leaf in each) for each in (mine, other))
    torch.testing.assert_close(
        *(
            {path: leaf for path, leaf in each if isinstance(leaf, torch.Tensor)}
            for each in (mine, other)
        ),
        atol=1e-9,
        rtol=1e-9,
    )
    assert [each for each in mine if not isinstance(each[1], torch.Tensor)] == [
        each for each in other if not isinstance(each[1], torch.Tensor)
    ]


OPTIONS = {
    "sharded": {},
    "whole": {"full_state_dict": True},
    "whole on the host": {"full_state_dict": True, "cpu_offload": True},
    "from the first rank": {"full_state_dict": True, "broadcast_from_rank0": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole and flat": {"flatten_optimizer_state_dict": True, "full_state_dict": True},
}


@pytest.mark.parametrize(
    ("door", "their_door", "name", "size"),
    [
        ("function", "function", "sharded", 3),
        ("function", "function", "whole on the host", 2),
        # What the first rank has is sent to the whole world.
        ("wrapper", "function", "from the first rank", 4),
        survey(("wrapper", "function", "flat", 2)),
        ("function", "function", "whole and flat", 2),
        survey(("wrapper", "wrapper", "whole", 2)),
    ],
)
@on_processes("size")
def test_states_are_pytorchs(group, size, door, their_door, name):
    """With these options ours and theirs are the same, and each goes on from the other's."""
    options = StateDictOptions(**OPTIONS[name])
    pairs = {"ours": train_ours(group, door), "theirs": train_theirs(group, their_door)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns of its own use of ShardedTensor and of DCP
        states = {who: get_state_dict(*pair, options=options) for who, pair in pairs.items()}
        # FSDP1 would give ShardedTensors in the sharded form: compared whole then.
        if their_door == "function" or options.full_state_dict:
            _compare(_whole(states["ours"]), _whole(states["theirs"]))
        if options.full_state_dict and options.cpu_offload:
            assert bool(states["ours"][0]) == (dist.get_rank() == 0)
            return
        if options.full_state_dict and options.flatten_optimizer_state_dict:
            return  # PyTorch gives that, but cannot load it: KeyError in its own unflattening
        exchangeable = their_door == "function" or options.full_state_dict
        source = {"ours": "theirs", "theirs": "ours"} if exchangeable else {"ours": "ours"}
        kept = copy.deepcopy(states)  # a step changes what they share
        for who, other in source.items():
            model_state, optimizer_state = kept[other]
            model, optimizer = pairs[who]
            step(group, model, optimizer, 7)  # something to be undone
            if options.broadcast_from_rank0 and dist.get_rank() > 0:
                model_state, optimizer_state = {}, {}
            set_model_state_dict(model, model_state, options=options)
            set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    if exchangeable:
        losses = [step(group, *pair, 8) for pair in pairs.values()]
        assert abs(losses[0] - losses[1]) < 1e-5
        again = [step(group, *pair, 9) for pair in pairs.values()]
        assert abs(again[0] - again[1]) < 1e-5


@pytest.mark.parametrize("door", DOORS)
@on_processes(2)
def test_what_is_left_out_and_named_otherwise(group, door):
    """As with PyTorch's."""
    found = []
    for train, which in ((train_ours, door), (train_theirs, "function")):
        model, _ = train(group, which)
        model.get_parameter("head.weight").requires_grad_(False)
        part = {model.blocks[0]}
        chosen = (
            {"options": StateDictOptions(ignore_frozen_params=True)},
            {"submodules": part},
            {"submodules": part, "options": StateDictOptions(keep_submodule_prefixes=False)},
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # submodules is deprecated
            found.append([sorted(get_model_state_dict(model, **each)) for each in chosen])
            if door == "wrapper":  # submodules are found by their path, which has one level more
                found[-1] = found[-1][:1]
        partial = {"norm.weight": torch.full((12,), 5.0).double()}
        loose = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, partial, options=loose)
        weights = _whole(get_model_state_dict(model))
        assert weights["norm.weight"].unique().tolist() == [5.0]
    assert found[0] == found[1]


# ---- FSDP1's own functions ----------------------------------------------------------------------


@on_processes(2)
def test_states_by_name(group):
    """FSDP1's state dicts of optimizers: ours, theirs, each loaded by the other."""
    found = {}
    for who, package, train in (("ours", ours, train_ours), ("theirs", theirs, train_theirs)):
        api = package.FullyShardedDataParallel
        model, optimizer = train(group, "wrapper")
        # With offload_to_cpu PyTorch's gives, on a CPU, the second moment in place of the first.
        kind = package.StateDictType.FULL_STATE_DICT
        config = package.FullOptimStateDictConfig(offload_to_cpu=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with api.state_dict_type(model, kind, None, config):
                found[who] = model, optimizer, api.optim_state_dict(model, optimizer, group=group)
    model, optimizer, mine = found["ours"]
    other = found["theirs"][2]
    for each in (mine, other):
        each["param_groups"] = [{**g, "params": sorted(g["params"])} for g in each["param_groups"]]
    _compare(mine["state"], other["state"])
    api = ours.FullyShardedDataParallel
    ways = {
        "shard": lambda: api.shard_full_optim_state_dict(other, model, optim=optimizer),
        "scatter": lambda: api.scatter_full_optim_state_dict(
            other if group.rank() == 0 else None, model, optim=optimizer
        ),
        "to load": lambda: api.optim_state_dict_to_load(model, optimizer, other),
        "flatten": lambda: api.flatten_sharded_optim_state_dict(
            api.sharded_optim_state_dict(model, optimizer), model, optimizer
        ),
    }
    for name, way in ways.items():
        for state in optimizer.state.values():
            state["exp_avg"].fill_(float("nan")) if name != "flatten" else None
        optimizer.load_state_dict(way())
        again = api.full_optim_state_dict(model, optimizer, rank0_only=False)
        _compare(again["state"], mine["state"])
        assert again["param_groups"][1]["betas"] == (0.8, 0.9), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        their_model, their_optimizer, _ = found["theirs"]
        back = theirs.FullyShardedDataParallel.shard_full_optim_state_dict(
            api.full_optim_state_dict(model, optimizer, rank0_only=False),
            their_model,
            optim=their_optimizer,
        )
    their_optimizer.load_state_dict(back)
    losses = [step(group, found[who][0], found[who][1], 8) for who in found]
    assert abs(losses[0] - losses[1]) < 1e-5
    assert "blocks.0.attention.qkv.weight" in mine["state"]


@on_processes(3)
def test_forms_of_states(group):
    """`optim_state_dict` and `state_dict` in each form that can be chosen, saved and loaded."""
    api = ours.FullyShardedDataParallel
    model, optimizer = train_ours(group, "wrapper")
    expected = _whole(api.full_optim_state_dict(model, optimizer, rank0_only=False))
    weights = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    counts = {}
    for kind, config, optimizer_config in (
        ("FULL", None, None),
        (
            "FULL",
            ours.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            ours.FullOptimStateDictConfig(rank0_only=True),
        ),
        ("SHARDED", None, None),
        ("SHARDED", ours.ShardedStateDictConfig(offload_to_cpu=True), None),
        ("LOCAL", None, None),
    ):
        with api.state_dict_type(
            model, StateDictType[f"{kind}_STATE_DICT"], config, optimizer_config
        ):
            state, named = model.state_dict(), api.optim_state_dict(model, optimizer)
            counts[kind, config is None] = len(state), len(named)
            if kind != "LOCAL" and state:
                _compare(_whole(named)["state"], expected["state"])
            for param in model.parameters():
                param.data.fill_(float("nan"))
            for each in optimizer.state.values():
                each["exp_avg_sq"].fill_(float("nan"))
            if not state:
                state = weights  # as a script would send it from the first rank
            model.load_state_dict(state)
            loaded = api.optim_state_dict_to_load(model, optimizer, named, group=group)
            optimizer.load_state_dict(loaded)
        again = _whole(api.full_optim_state_dict(model, optimizer, rank0_only=False))
        _compare(again["state"], expected["state"])
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), weights[name]), (kind, name)
    all_of_it, nothing = (len(weights), 2), (0, 0)
    assert counts == {
        ("FULL", True): all_of_it,
        ("FULL", False): nothing if group.rank() else all_of_it,
        ("SHARDED", True): all_of_it,
        ("SHARDED", False): all_of_it,
        ("LOCAL", True): all_of_it,
    }


@on_processes(2)
def test_plain_models_and_optimizers(group):
    """The state of an ordinary optimizer of the plain model, by number, both ways."""
    api, key = ours.FullyShardedDataParallel, ours.OptimStateKeyType
    model, optimizer = train_ours(group, "wrapper")
    whole = api.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = _gpt()
    plain.load_state_dict({n: p.detach().full_tensor() for n, p in model.named_parameters()})
    heads = [p for n, p in plain.named_parameters() if "head" in n]
    others = [p for n, p in plain.named_parameters() if "head" not in n]
    alone = torch.optim.AdamW([{"params": others}, {"params": heads}], lr=1e-2)
    by_number = api.rekey_optim_state_dict(whole, key.PARAM_ID, plain, optim=alone)
    alone.load_state_dict(copy.deepcopy(by_number))
    named = api.rekey_optim_state_dict(alone.state_dict(), key.PARAM_NAME, plain, optim=alone)
    _compare(named["state"], whole["state"])
    assert alone.param_groups[1]["lr"] == 3e-3
    # An ordinary state dict, loaded before the first step: cut when that is taken.
    fresh_model, _ = train_ours(group, "wrapper")
    heads = [p for n, p in fresh_model.named_parameters() if "head" in n]
    others = [p for n, p in fresh_model.named_parameters() if "head" not in n]
    fresh = torch.optim.AdamW([{"params": others}, {"params": heads}], lr=1e-2)
    fresh.load_state_dict(copy.deepcopy(alone.state_dict()))
    losses = [
        [step(group, model, optimizer, n), step(group, fresh_model, fresh, n)] for n in (8, 9)
    ]
    assert all(abs(a - b) < 1e-6 for a, b in losses), losses
    state = next(iter(fresh.state.values()))
    assert type(state["exp_avg"]) is ShardedParameter


# ---- meshes, files ------------------------------------------------------------------------------


@on_processes(2)
def test_the_meta_device(group):
    with torch.device("meta"):
        model = shard(Odd(), group, "function")
    state = model.state_dict()
    assert all(value.is_meta for value in state.values())
    assert isinstance(state["conv.weight"], DTensor)
    mesh = state["conv.weight"].device_mesh
    plain = Odd().state_dict()
    values = {
        name: distribute_tensor(plain[name], mesh, value.placements)
        if isinstance(value, DTensor)
        else plain[name]
        for name, value in state.items()
    }
    model.load_state_dict(values, assign=True)
    for name, param in model.named_parameters():
        assert isinstance(param, ShardedParameter)
        assert torch.equal(param.full_tensor(), plain[name])


def save_files(group, folder):
    """To `torch.distributed.checkpoint`'s files; the losses of the next steps."""
    model, optimizer = train_ours(group, "function")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder, process_group=group)
    return _whole(weights), _whole(state)


def load_files(group, folder, door):
    model, optimizer = train_ours(group, door)
    step(group, model, optimizer, 5)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return tuple(_whole(each) for each in get_state_dict(model, optimizer))


def test_files_are_read_by_another_number_of_ranks(gloo_world, tmp_path):
    saved = gloo_world.run(4, save_files, tmp_path)[0]
    for size, door in zip((2, 3), DOORS, strict=True):
        for loaded in gloo_world.run(size, load_files, tmp_path, door):
            _compare(loaded, saved)


# ---- at odd times, of odd optimizers ------------------------------------------------------------


@on_processes(2)
def test_pytorchs_functions_get_rows_whatever_is_chosen(group):
    model, _ = train_ours(group, "wrapper")
    weights = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    api = ours.FullyShardedDataParallel
    for kind, config in (
        (StateDictType.FULL_STATE_DICT, ours.FullStateDictConfig(rank0_only=True)),
        (StateDictType.LOCAL_STATE_DICT, None),
    ):
        api.set_state_dict_type(model, kind, config)
        state = get_model_state_dict(model)
        _compare({name: _whole(state[name]) for name in weights}, weights)
        set_model_state_dict(model, {name: value + 1 for name, value in state.items()})
        for name, param in model.named_parameters():
            assert torch.equal(param.full_tensor(), weights[name] + 1), (kind, name)
        set_model_state_dict(model, state)


@on_processes(2)
def test_what_is_shown_by_hand_is_no_entry(group):
    """Nor is it loaded into."""
    plain = Odd().state_dict()
    model = shard(Odd(), group, "function")
    model.unshard()
    state = model.state_dict()
    assert isinstance(state["conv.weight"], DTensor)
    model.unshard()
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    model.reshard()
    assert torch.equal(model.get_parameter("conv.weight").full_tensor(), plain["conv.weight"] + 1)


class Scaled(nn.Module):
    """With a parameter without dims, beside which an optimizer's numbers look like its state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.linear(x) * self.scale).square().sum()


@pytest.mark.parametrize("kind", ["Adam", "NAdam", "ASGD"])
@on_processes(2)
def test_numbers_of_an_optimizer_are_not_cut(group, kind):
    """An ordinary optimizer's state, loaded into one over sharded parameters, goes on alike."""

    def train(model, optimizer, steps):
        losses = []
        for number in range(steps):
            loss = model(torch.full((2, 3), number + 1.0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    make = getattr(torch.optim, kind)
    plain = Scaled()
    alone = make(plain.parameters(), lr=0.01)
    train(plain, alone, 2)
    model = shard(Scaled(), group, "function")
    model.load_state_dict(plain.state_dict())
    optimizer = make(model.parameters(), lr=0.01)
    train(model, optimizer, 1)  # it is looked at when it steps
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    for mine, other in zip(train(model, optimizer, 3), train(plain, alone, 3), strict=True):
        assert abs(mine - other) <= 1e-5 * abs(other)
    assert type(optimizer.state[model.get_parameter("scale")]["step"]) is torch.Tensor


@on_processes(2)
def test_loaded_spans_do_not_follow_steps(group):
    """Those of the local form."""
    api = ours.FullyShardedDataParallel
    model, optimizer = train_ours(group, "wrapper")
    with api.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        named = api.optim_state_dict(model, optimizer)
        before = copy.deepcopy(named)
        optimizer.load_state_dict(api.optim_state_dict_to_load(model, optimizer, named))
    step(group, model, optimizer, 3)
    _compare(named["state"], before["state"])
