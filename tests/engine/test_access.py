# SPDX-License-Identifier: Apache-2.0
"""Full parameters by hand, state dicts by type, methods run as forward, and what is refused."""

import copy
import pickle

import pytest
import torch
from support.beside import shard
from support.models import GPT, Block, loss_of, make_batches, seeded
from support.stack import LAYERS, WIDTH, shard_stack
from support.threads import on_ranks
from torch import nn

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld, LocalWorldError
from fullshard.torch import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedParameter,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    summon_full_params,
    tracing,
)
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.step.managed import managed_unit_of
from fullshard.torch.step.paths import make_ties

FSDP = FullyShardedDataParallel


def gpt():
    return seeded(GPT)


def wrap(comm, **options):
    return shard(gpt(), comm, "wrapper", [Block], **options)


def step(model, number=1):
    for inputs, targets in make_batches("gpt", number, 2):
        loss_of(model(inputs), targets).backward()


# ---- summon_full_params -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cpu_offload": CPUOffload(offload_params=True)},
        {"mixed_precision": MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)},
    ],
    ids=str,
)
def test_summoned_parameters_are_those_of_the_plain_model(options):
    plain = dict(gpt().named_parameters())

    def body(comm):
        model = wrap(comm, **options)
        with FSDP.summon_full_params(model):
            shown = dict(model.named_parameters())
            assert all(type(p) is nn.Parameter for p in shown.values())
            return {name: param.detach().clone() for name, param in shown.items()}

    for found in LocalWorld(3).run(body):
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@on_ranks(3)
def test_what_is_written_is_kept_if_asked(comm):
    model = wrap(comm)
    with summon_full_params(model):
        model.module.head.weight.data.fill_(7)
        model.module.blocks[0].module.norm1.weight = nn.Parameter(torch.full((12,), 3.0))
    with summon_full_params(model, writeback=False):
        model.module.norm.weight.data.fill_(9)
    params = dict(model.named_parameters())
    assert [
        params[name].full_tensor().unique().tolist()
        for name in ("head.weight", "blocks.0.norm1.weight", "norm.weight")
    ] == [[7.0], [3.0], [1.0]]


def test_summoning_one_unit_or_on_one_rank():
    def body(comm):
        model = wrap(comm)
        with summon_full_params(model, recurse=False):
            shallow = [type(p) is ShardedParameter for p in model.module.blocks[0].parameters()]
            assert type(model.module.head.weight) is nn.Parameter
        with summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
            seen = type(model.module.head.weight) is nn.Parameter
        with pytest.raises(ConfigurationError, match="writeback with rank0_only"):
            summon_full_params(model, rank0_only=True).__enter__()
        return all(shallow), seen

    assert LocalWorld(2).run(body) == [(True, True), (True, False)]


@on_ranks(2)
def test_gradients_are_summoned_and_written_back(comm):
    model = wrap(comm)
    step(model)
    before = model.module.head.weight.grad.full_tensor()
    with summon_full_params(model, with_grads=True):
        assert torch.equal(model.module.head.weight.grad, before)
        model.module.head.weight.grad.mul_(2)
        model.module.norm.weight.grad = None
        model.module.norm.bias.grad = torch.ones(12)
    weight, norm = model.module.head.weight, model.module.norm
    assert norm.weight.grad is None
    assert norm.bias.grad.full_tensor().tolist() == [1.0] * 12
    assert torch.equal(weight.grad.full_tensor(), 2 * before)


@on_ranks(2)
def test_models_are_evaluated_while_they_are_summoned(comm):
    model = wrap(comm).eval()
    inputs = make_batches("gpt", 1, 2)[0][0]
    with torch.no_grad():
        expected = model(inputs)
        for recurse in (True, False):  # units below the root are gathered as they always are
            with summon_full_params(model, recurse=recurse, writeback=False):
                assert torch.equal(model(inputs), expected)
        with summon_full_params(model, rank0_only=True, writeback=False):
            if comm.rank == 0:
                model.module.head.weight.zero_()
                assert model(inputs).abs().max() == 0
            else:
                with pytest.raises(UsageError, match="a rank that does not see its parameters"):
                    model(inputs)
        assert torch.equal(model(inputs), expected)


@on_ranks(2)
def test_a_root_whose_parameters_are_all_below_is_evaluated_while_it_is_summoned(comm):
    model = FSDP(nn.Sequential(FSDP(seeded(lambda: nn.Linear(3, 2)), comm)), comm)
    with torch.no_grad():
        expected = model(torch.ones(1, 3))
        with summon_full_params(model, writeback=False):
            assert torch.equal(model(torch.ones(1, 3)), expected)


@on_ranks(2)
def test_no_training_and_no_second_summoning_within(comm):
    model = wrap(comm)
    inputs = make_batches("gpt", 1, 2)[0][0]
    with summon_full_params(model):
        with pytest.raises(UsageError, match="cannot run forward within summon_full_params"):
            model(inputs)
        with pytest.raises(UsageError, match="summoned already"):
            summon_full_params(model).__enter__()
    loss = model(inputs).sum()
    with pytest.raises(UsageError, match="in the middle of a step"):
        summon_full_params(model).__enter__()
    loss.backward()


# ---- unshard and reshard ------------------------------------------------------------------------


def test_a_state_dict_looks_once_for_what_is_unsharded_or_tied(monkeypatch):
    looked = []

    def counted(root):
        looked.append(root)
        return make_ties(root)

    monkeypatch.setattr("fullshard.torch.fsdp2.module.make_ties", counted)
    comm = SoloComm()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module, mesh=comm)
    model.state_dict()
    assert looked == [model]

    # One that a hook of another asks for is none of its parts, and a wrapper does not look.
    inner = fully_shard(nn.Linear(2, 2), mesh=comm)
    found = []
    outer = fully_shard(nn.Linear(2, 2), mesh=comm)
    outer.register_state_dict_post_hook(lambda *_: found.append(inner.state_dict(keep_vars=True)))
    for collect in (outer.state_dict, FSDP(nn.Sequential(inner), comm).state_dict):
        inner.unshard()
        found.append(collect(keep_vars=True))
    assert {type(value) for state in found for value in state.values()} == {ShardedParameter}


@on_ranks(2)
def test_an_unsharded_unit_is_gathered_again_after_the_optimizer(comm):
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=comm)
    model.unshard()
    with torch.no_grad():
        model.weight.fill_(1.0)  # shows the full one, which nobody writes back
    model.reshard()
    model.unshard()
    for param in managed_unit_of(model).unit.sharded:
        param.detach().fill_(3.0)
    assert model(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


@on_ranks(2)
def test_a_unit_resharded_between_forward_and_backward_is_gathered_again(comm):
    model = fully_shard(nn.Linear(3, 3), mesh=comm, reshard_after_forward=False)
    loss = model(torch.ones(1, 3, requires_grad=True)).square().sum()
    model.reshard()
    loss.backward()
    assert model.weight.grad.full_tensor().isfinite().all().item()


@on_ranks(2)
def test_settings_are_changed_outside_of_units_only(comm):
    model = shard_stack(comm)
    loss = model(torch.ones(1, WIDTH)).sum()
    # Between forward and backward; `test_settings_between_steps` has units that are in either.
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    loss.backward()
    with pytest.raises(ConfigurationError, match="expected a module that is a unit's"):
        model.set_modules_to_backward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ConfigurationError, match="a finite number of more than 0"):
        model.set_gradient_divide_factor(0)
    share_comm_ctx([model, *model.blocks])
    with pytest.raises(ConfigurationError, match="expected a module that is a unit's"):
        share_comm_ctx([nn.Linear(1, 1)])


def test_lists_say_what_is_gathered_ahead():
    def body(comm):
        model = shard_stack(comm)
        first, second, *rest = model.blocks
        first.set_modules_to_forward_prefetch(list(rest))
        second.set_modules_to_forward_prefetch([])
        model(torch.ones(1, WIDTH)).sum().backward()
        with tracing(model) as trace:
            model(torch.ones(1, WIDTH)).sum().backward()
        return [r.unit for r in trace.records if r.op == "gather"], len(model.blocks)

    gathered, blocks = LocalWorld(2).run(body)[0]
    rest = [f"blocks.{number}" for number in range(2, blocks)]
    at = gathered.index("blocks.0") + 1
    assert gathered[at : at + len(rest) + 1] == [*rest, "blocks.1"]


@on_ranks(2)
def test_reset_iter_state_gives_the_memory_back(comm):
    model = shard_stack(comm, reshard_after_forward=False)
    units = [managed_unit_of(block).unit for block in model.blocks]
    model(torch.ones(1, WIDTH)).sum()
    with pytest.raises(UsageError, match="for the root module"):
        model.blocks[0].reset_iter_state()
    before = [unit.transient_bytes == unit.layout.full_bytes for unit in units]
    model.reset_iter_state()
    after = [unit.transient_bytes for unit in units]
    model(torch.ones(1, WIDTH)).sum().backward()
    assert all(before)
    assert after == [0] * LAYERS


# ---- methods run as forward ---------------------------------------------------------------------


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.decode(self.encode(x))

    def encode(self, x, *, scale=1.0):
        return self.inner(x) * scale

    def decode(self, x):
        return x.sum(-1)

    def fail(self):
        raise ValueError("on purpose")


@on_ranks(2)
def test_other_methods_gather_too(comm):
    model = seeded(Coder)
    expected = model.encode(torch.ones(2, 3), scale=2.0)
    fully_shard(model, mesh=comm)
    for name in ("encode", "fail"):
        register_fsdp_forward_method(model, name)
    register_fsdp_forward_method(nn.Linear(1, 1), "anything")  # no unit's: nothing happens
    with pytest.raises(ConfigurationError, match="has no method 'nothing'"):
        register_fsdp_forward_method(model, "nothing")
    found = model.encode(torch.ones(2, 3), scale=2.0)
    found.sum().backward()
    with pytest.raises(ValueError, match="on purpose"):
        model.fail()
    model(torch.ones(2, 3)).sum().backward()
    grad = model.inner.bias.grad.full_tensor().tolist()
    assert torch.equal(found, expected)
    assert grad == [6.0, 6.0, 6.0]


# ---- state dicts --------------------------------------------------------------------------------


def test_state_dicts_by_type():
    plain = gpt().state_dict()

    def body(comm):
        model = wrap(comm)
        unchosen = model.state_dict()
        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = model.state_dict()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            sharded = model.state_dict()
            assert FSDP.get_state_dict_type(model).state_dict_type.name == "SHARDED_STATE_DICT"
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
                first = model.state_dict()
            again = model.state_dict()
        assert all(torch.equal(unchosen[name], plain[name]) for name in plain)
        with pytest.raises(ConfigurationError, match="expected a FullStateDictConfig, got Sharded"):
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, ShardedStateDictConfig())
        with pytest.raises(ConfigurationError, match="holds no FullyShardedDataParallel"):
            FSDP.get_state_dict_type(nn.Linear(1, 1))
        assert full.keys() == again.keys() == plain.keys() == sharded.keys()
        assert all(torch.equal(full[name], plain[name]) for name in plain)
        assert FSDP.get_state_dict_type(model).state_dict_type.name == "FULL_STATE_DICT"
        # Ranks that are threads have no mesh to place a DTensor on.
        assert all(type(value) is ShardedParameter for value in sharded.values())
        assert all(type(v) is ShardedParameter for v in model.state_dict(keep_vars=True).values())
        model.load_state_dict({name: torch.ones_like(value) for name, value in full.items()})
        assert model.module.head.weight.full_tensor().unique().tolist() == [1.0]
        return len(first)

    assert LocalWorld(2).run(body) == [len(plain), 0]


def test_a_full_state_dict_on_one_rank_is_told_by_name():
    """It is collective: a rank that goes on meanwhile waits for it in another collective."""

    def body(comm):
        model = wrap(comm)
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
        comm.world.timeout_s = 1.0
        if comm.rank == 0:
            model.state_dict()
        else:
            step(model)

    with pytest.raises(LocalWorldError) as told:
        LocalWorld(2).run(body)
    assert "what is in state_dict()" in str(told.value)
    assert "gather of unit" in str(told.value)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["wrapper", "function"])
@on_ranks(2)
def test_copies_and_pickles_are_refused(comm, door):
    model = wrap(comm) if door == "wrapper" else fully_shard(gpt(), mesh=comm)
    with pytest.raises(UsageError, match="cannot be copied: its hooks and communicators"):
        copy.deepcopy(model)
    with pytest.raises(UsageError, match="cannot be pickled: one rank holds a part"):
        pickle.dumps(model)


# ---- what scripts read --------------------------------------------------------------------------


@on_ranks(2)
def test_a_parameter_has_a_local_part_and_no_placement(comm):
    param = next(wrap(comm).parameters())
    assert param.to_local() is param.local
    assert not hasattr(param, "placements")
    with pytest.raises(AttributeError, match=r"no placement\. Use \.span and \.local"):
        _ = param.placements
