# SPDX-License-Identifier: Apache-2.0
"""Weights that are tied after sharding are one parameter, as on one process."""

import gc
import weakref

import pytest
import torch
from support.beside import DOORS, shard
from support.models import seeded
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import UsageError
from fullshard.torch import (
    ShardingStrategy,
    fully_shard,
    summon_full_params,
)
from fullshard.torch.step.managed import managed_unit_of

pytestmark = pytest.mark.usefixtures("checked_values")

TOKENS = torch.tensor([[0, 3, 1], [4, 2, 4]])


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.body = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, tokens):
        return self.head(self.body(self.emb(tokens)).tanh())


def language():
    return seeded(Language).double()


def tie(model):
    head, emb = (getattr(part, "module", part) for part in (model.head, model.emb))
    head.weight = emb.weight


UNITS = {
    "one unit": (),
    "a unit each": ("emb", "head"),
    "the head's own": ("head",),
    "the embedding's own": ("emb", "body"),
}


def trains_as(model, plain, comm, inner=None):
    assert len(list(model.parameters())) == len(list(plain.parameters())) == 4
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        loss, expected = model(TOKENS).square().mean(), plain(TOKENS).square().mean()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(
            norm.full_tensor(), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        )
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert inner.head.weight is inner.emb.weight
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, param in inner.named_parameters(remove_duplicate=False):
        name = name.replace("_fsdp_wrapped_module.", "")
        torch.testing.assert_close(param.detach().full_tensor(), expected[name].detach(), msg=name)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("between", ["nothing", "state_dict", "to", "summon", "load"])
@on_ranks(2)
def test_with_values_from_the_start(comm, door, align, units, between):
    inner, plain = language(), language()
    model = shard(inner, comm, door, units, align=align)
    tie(inner)
    tie(plain)
    if between == "state_dict":
        model.state_dict()
    elif between == "to":
        model.to("cpu")
    elif between == "summon":
        with summon_full_params(model):
            assert inner.head.weight.shape == (5, 3)
    elif between == "load":
        model.load_state_dict({k: v + 0 for k, v in plain.state_dict().items()})
    trains_as(model, plain, comm, inner)


def to_empty_first(model, plain):
    model.to_empty(device="cpu")
    tie(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(plain.get_parameter(name))


def tie_first(model, plain):
    tie(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(plain.get_parameter(name))


def put_one_by_one(model, plain, tied_first=False):
    if tied_first:
        tie(model)
    for name, param in plain.named_parameters(remove_duplicate=False):
        path, _, key = name.rpartition(".")
        if name != "head.weight":
            setattr(model.get_submodule(path), key, nn.Parameter(param.detach().clone()))
    if not tied_first:
        tie(model)


def put_into_a_tied_model(model, plain):
    put_one_by_one(model, plain, tied_first=True)
    tie(model)


def put_and_look_at_parts(model, plain):
    put_one_by_one(model, plain)
    list(model.head.parameters())
    list(model.emb.named_parameters())


def assigned(model, plain):
    model.load_state_dict(plain.state_dict(), assign=True)
    tie(model)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS.keys())
@on_ranks(2)
def test_an_optimizer_from_before_the_tie_trains_what_is_tied(comm, strategy, align, units):
    inner, plain = language(), language()
    model = shard(inner, comm, "wrapper", units, align=align, sharding_strategy=strategy)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, plain)]
    tie(inner)
    tie(plain)
    for _ in range(2):
        for part, optimizer in zip((model, plain), optimizers, strict=True):
            part(TOKENS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    head = getattr(inner.head, "module", inner.head)
    torch.testing.assert_close(head.weight.full_tensor(), plain.head.weight.detach())


PUTS = (to_empty_first, tie_first, put_one_by_one, put_into_a_tied_model, put_and_look_at_parts)


@pytest.mark.parametrize("align", ["row", "element"])
@pytest.mark.parametrize("units", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("put", [*PUTS, assigned], ids=lambda put: put.__name__)
@on_ranks(2)
def test_from_the_meta_device(comm, align, units, put):
    plain = language()
    tie(plain)
    with torch.device("meta"):
        inner = Language().double()
    model = shard(inner, comm, units=units, align=align)
    put(model, plain)
    trains_as(model, plain, comm, inner)


@on_ranks(2)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("use", ["emb", "head"])
def test_loading_does_not_take_in_a_parameter_put_at_one_use(comm, door, use):
    model = language()
    tie(model)
    model = shard(model, comm, door, align="row")
    model(TOKENS).sum().backward()
    mine = nn.Parameter(torch.ones(5, 3, dtype=torch.float64))
    part = getattr(model, use)
    part.weight = mine
    model.load_state_dict(language().state_dict())
    assert part.weight is mine
    with pytest.raises(UsageError, match="weight"):
        model(TOKENS)


@on_ranks(2)
def test_without_a_unit_around_both_and_after_the_first_forward_it_is_named(comm):
    model = language()
    for part in (model.emb, model.head):
        fully_shard(part, mesh=comm)
    tie(model)
    with pytest.raises(UsageError, match="before the first forward, below one sharded module"):
        model(TOKENS)
    model = shard(language(), comm, units=UNITS["a unit each"])
    model(TOKENS).sum().backward()
    tie(model)
    with pytest.raises(UsageError, match=r"'head\.weight' was tied to 'emb\.weight'"):
        model(TOKENS)


@on_ranks(1)  # in one thread: while one collects, another's gc.collect() does nothing
def test_when_a_unit_that_was_removed_goes_is_not_up_to_the_garbage_collector(comm):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=comm)
    fully_shard(model, mesh=comm)
    model(torch.ones(1, 3)).sum().backward()
    removed = weakref.ref(model[1])
    model[1] = nn.Identity()
    for _ in range(2):
        gc.collect()
        assert removed() is not None  # else another rank, which has not collected, goes another way
        model(torch.ones(1, 3)).sum().backward()
    del model, layer
    gc.collect()
    assert removed() is None


@on_ranks(2)
def test_a_tie_in_a_unit_inside_has_its_name_there(comm):
    model = nn.Sequential(language())
    for module in (model[0].emb, model[0].head, model[0], model):
        fully_shard(module, mesh=comm)
    tie(model[0])
    model(TOKENS).sum().backward()
    names = [each.spec.name for each in managed_unit_of(model[0]).unit.params]
    assert "emb.weight" in names
