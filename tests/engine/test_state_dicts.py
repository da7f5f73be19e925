# SPDX-License-Identifier: Apache-2.0
"""State dicts at the border: whole tensors, true DTensors, and PyTorch's own functions on them."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.models import seeded
from support.threads import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fullshard.core.errors import ConfigurationError
from fullshard.core.layout import Span, SpansOfRanks
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
    fully_shard,
)
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.torch.tensor.reslice import Cut, longest, overlaps, reslice, rows_of_ranks
from fullshard.wrap import ModuleWrapPolicy

DOORS = ("wrapper", "function")


# ---- geometry -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 9))
def test_rows_are_those_of_chunk(shape, size):
    flat = torch.arange(max(1, torch.Size(shape).numel())).float()[: torch.Size(shape).numel()]
    rows = rows_of_ranks(shape, size)
    if not shape:
        assert rows == [Span(0, 1)] * size
        return
    chunks = list(flat.view(shape).chunk(size))
    chunks += [flat[:0]] * (size - len(chunks))
    for span, chunk in zip(rows, chunks, strict=True):
        assert flat[span.start : span.stop].tolist() == chunk.flatten().tolist()


def spans(numel, cuts):
    ends = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    return [Span(start, stop) for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_intervals_are_exchanged(size):
    generator = torch.Generator().manual_seed(size)

    def some(high, count):
        return torch.randint(high + 1, (count,), generator=generator).tolist()

    pairs = [
        (spans(numel, some(numel, size - 1)), spans(numel, some(numel, size - 1)))
        for numel in (0, 1, 7, 50, 51)
    ]
    pairs.append(([Span(0, 1)] + [Span(1, 1)] * (size - 1), [Span(0, 1)] * size))

    def body(comm):
        cuts, wanted = [], []
        for number, (held, wants) in enumerate(pairs):
            flat = torch.arange(held[-1].stop).float() + 100 * number
            mine, want = held[comm.rank], wants[comm.rank]
            cuts.append(Cut(flat[mine.start : mine.stop], held, wants))
            wanted.append(flat[want.start : want.stop].tolist())
        return [each.tolist() for each in reslice(comm, cuts)] == wanted

    assert all(LocalWorld(size).run(body))


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 40), st.data())
def test_overlaps_by_division_are_those_by_comparison(numel, shards, start, data):
    slice_numel = data.draw(st.integers(-(-(start + numel) // shards), 120))
    by_division = SpansOfRanks(start, numel, slice_numel, shards)
    ends = sorted(data.draw(st.tuples(*[st.integers(0, numel)] * 2)))
    wanted = Span(*ends)
    assert overlaps(by_division, wanted) == overlaps(list(by_division), wanted)
    assert longest(by_division) >= longest(list(by_division))


# ---- entries ------------------------------------------------------------------------------------


@on_ranks(2)
def test_keys_that_do_not_fit_are_named_as_a_state_dict_has_them(comm):
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(nn.Sequential(nn.Linear(2, 2)), comm, auto_wrap_policy=policy)
    state = {"0.weight": torch.ones(2, 2), "0.other": torch.ones(2)}
    found = model.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["0.bias"], ["0.other"])
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.other"'):
        model.load_state_dict(state)


@on_ranks(2)
def test_states_of_optimizers_come_without_groups_and_by_name_and_in_order(comm):
    model = FSDP(nn.Sequential(nn.Linear(2, 2)), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = FSDP.optim_state_dict(model, optimizer)
    names = ["0.weight", "0.bias"]
    for stored in (saved, {"state": dict(reversed(saved["state"].items()))}):
        for named, keys in ((False, [0, 1]), (True, names)):
            loaded = FSDP.optim_state_dict_to_load(
                model, optimizer, stored, is_named_optimizer=named
            )
            assert list(loaded["state"]) == keys
            assert [group["params"] for group in loaded.get("param_groups", ())] == (
                [keys] if "param_groups" in stored else []
            )
    without = {"state": optimizer.state_dict()["state"]}
    assert list(FSDP.optim_state_dict(model, optimizer, without)) == ["state"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@on_ranks(2)
def test_spans_are_not_saved_as_if_they_were_copies_of_one_tensor(comm, tmp_path):
    model = FSDP(nn.Linear(4, 4), comm)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        for told in (state, copy.deepcopy(state)):
            with pytest.raises(CheckpointException, match="use SHARDED_STATE_DICT with it"):
                dcp.save(told, checkpoint_id=tmp_path / f"{comm.rank}", no_dist=True)
        whole = {"bias": torch.zeros(state["bias"].shape)}  # of the size of the span
        dcp.save(whole, checkpoint_id=tmp_path / f"whole {comm.rank}", no_dist=True)
        if comm.rank == 0:
            told = {"bias": state["bias"]}
            with pytest.raises(CheckpointException, match="use SHARDED_STATE_DICT with it"):
                dcp.load(told, checkpoint_id=tmp_path / f"whole {comm.rank}", no_dist=True)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        plain = torch.load(file, weights_only=True)
        assert {type(value) for value in plain.values()} == {torch.Tensor}
        kept = {name: value.clone() for name, value in plain.items()}
        nn.init.zeros_(model.weight)
        model.load_state_dict(plain)
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name])


@on_ranks(2)
def test_a_state_of_another_optimizer_is_refused(comm):
    model = FSDP(nn.Linear(3, 2), comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    state["param_groups"][0]["params"] = ["weight", "gone"]
    state["state"]["gone"] = {}
    with pytest.raises(ConfigurationError, match=r"no group of it are \['bias'\].*\['gone'\]"):
        FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1.0)
    with pytest.raises(ConfigurationError, match="not the model's"):
        FSDP.full_optim_state_dict(model, other)
    strange = {"state": {"weight": {"what": object()}}, "param_groups": []}
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        FSDP.scatter_full_optim_state_dict(strange, model, optim=optimizer)


@on_ranks(2)
def test_a_learning_rate_that_is_a_tensor_is_sent(comm):
    model = FSDP(nn.Linear(3, 2), comm)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.9))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    full = FSDP.full_optim_state_dict(model, optimizer)  # the first rank has it
    other = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    other.load_state_dict(FSDP.scatter_full_optim_state_dict(full, model, optim=other))
    assert torch.equal(other.param_groups[0]["lr"], torch.tensor(0.5))
    assert other.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize("ignored", [False, True])  # by the root wrapper; else there is none
@on_ranks(2)
def test_states_of_nested_wrappers_and_of_parameters_that_none_has(comm, ignored):
    def build():
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)))
        model[1] = FSDP(nn.Sequential(model[1]), comm)
        model[2] = FSDP(nn.Sequential(FSDP(model[2], comm)), comm)
        model = FSDP(model, comm, ignored_modules=[model[0]]) if ignored else model
        return model, torch.optim.Adam(model.parameters())

    def step(model, optimizer):
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    model, optimizer = build()
    step(model, optimizer)
    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    names = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.0.weight", "2.0.bias"]
    assert list(full["state"]) == full["param_groups"][0]["params"] == names
    went_on = [step(model, optimizer) for _ in range(3)]
    for load in (FSDP.shard_full_optim_state_dict, FSDP.scatter_full_optim_state_dict):
        again, fresh = build()
        step(again, fresh)
        fresh.load_state_dict(load(full, again, optim=fresh))
        assert [step(again, fresh) for _ in range(3)] == went_on
    again, fresh = build()
    step(again, fresh)
    state = get_optimizer_state_dict(again, fresh)  # by names of the module around them all
    assert sorted(state["state"]) == sorted(names)
    set_optimizer_state_dict(again, other := torch.optim.Adam(again.parameters()), state)
    assert [step(again, other) for _ in range(3)] == went_on


class Renaming(nn.Linear):
    """A user's class whose methods take what the user gives them, and no more."""

    def state_dict(self):
        return {f"mine.{name}": value for name, value in super().state_dict().items()}

    def load_state_dict(self, state):
        super().load_state_dict({name.removeprefix("mine."): each for name, each in state.items()})


@on_ranks(1)
def test_a_class_of_its_own_methods_gets_what_was_given(comm):
    model = fully_shard(Renaming(2, 3), mesh=comm)
    state = model.state_dict()
    assert list(state) == ["mine.weight", "mine.bias"]
    model.load_state_dict({name: torch.full_like(value, 2) for name, value in state.items()})
    assert model.bias.full_tensor().tolist() == [2, 2, 2]


@on_ranks(2)
def test_buffers_are_saved_in_the_dtype_they_had(comm):
    low = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    inner = FSDP(nn.BatchNorm1d(3), comm, mixed_precision=low)
    model = FSDP(nn.Sequential(inner), comm, mixed_precision=low)
    assert inner.running_mean.dtype == torch.bfloat16
    state = model.state_dict()
    assert {each.dtype for each in state.values()} == {torch.float32, torch.int64}
    state["0.running_mean"] += 2
    model.load_state_dict(state)
    assert inner.running_mean.tolist() == [2, 2, 2]
    assert inner.state_dict()["running_mean"].dtype == torch.float32
    assert inner.running_mean.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("size", "rank0_only", "align"),
    [(3, False, "element"), (12, True, "element"), (12, False, "row"), (12, False, "matrix")],
)
def test_whole_states_take_one_gather_a_unit_whatever_the_number_of_ranks(
    size, rank0_only, align, monkeypatch
):
    calls = []
    monkeypatch.setattr("fullshard.torch.tensor.ownership.PADDING_BYTES", 0)

    def counting(name, own):
        def call(self, *args, **kwargs):
            if self.rank == 0:
                calls.append(name)
            return own(self, *args, **kwargs)

        return call

    for name in ("all_gather", "broadcast"):
        monkeypatch.setattr(LocalComm, name, counting(name, getattr(LocalComm, name)))

    def body(comm):
        model = seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))))
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        model = FSDP(model, comm, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), align=align)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        moved = {name: value.full_tensor() for name, value in model.named_parameters()}
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
        of_state = FullOptimStateDictConfig(rank0_only=rank0_only)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, of_state):
            comm.all_reduce([torch.zeros(1)]).wait()
            calls.clear()
            state = model.state_dict()
            comm.all_reduce([torch.zeros(1)]).wait()
            counted = [calls.copy()]
            comm.all_reduce([torch.zeros(1)]).wait()
            calls.clear()
            of_optimizer = FSDP.optim_state_dict(model, optimizer)
            counted.append(calls.copy())
        if rank0_only and comm.rank:
            assert state == of_optimizer == {}
        else:
            assert state.keys() == plain.keys()
            for (name, value), whole in zip(state.items(), moved.values(), strict=True):
                assert torch.equal(value, whole), name
            assert of_optimizer["state"]["0.weight"]["exp_avg"].shape == (5, 5)
        return counted

    of_model, of_optimizer = LocalWorld(size).run(body)[0]
    assert of_model == of_optimizer == ["all_gather"] * 3
