# SPDX-License-Identifier: Apache-2.0
"""A checkpoint holds the state of its moment, though the device goes on; it loads to the bit."""

from itertools import product

import pytest
import torch
from gpu.stream_world import LateCopies, StreamWorld, poison_buffers, sleep_on
from gpu.training import build, cases, full_parameters, shard, train, world_of_one
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fullshard.testing import LocalWorld
from fullshard.torch import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    load_checkpoint,
    load_full_weights,
    overlap_optimizer,
    save_checkpoint,
    save_full_weights,
)

WIDTH = 96
OPTIONS = {
    "plain": {},
    "elements": {"align": "element"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def make(comm, device, **options):
    model = shard(build(device, width=WIDTH), comm, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model, optimizer, comm, device, number):
    """Queued behind a sleep: the device is far behind the host when this returns."""
    sleep_on(device)
    tokens = torch.arange(12, device=device).view(2, 6) + number + comm.rank
    model(tokens % 17).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    """Copies of all that a rank holds, in one list."""
    states = [optimizer.state[param] for param in model.parameters()]
    held = [param.local for param in model.parameters()]
    for state in states:
        held += [getattr(value, "local", value) for _, value in sorted(state.items())]
    return [value.detach().cpu().clone() for value in held]


def assert_equal(found, expected):
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


SAVES = [
    *product(("plain", "offload"), (False, True), (None, "backward", "forward")),
    *product(("elements",), (False, True), (None,)),
]


@pytest.mark.parametrize(
    ("device", "option", "asynchronous", "beside"),
    cases(*SAVES, also_on_cpu=[("offload", True, "forward")]),
    indirect=["device"],
)
def test_a_checkpoint_has_what_was_there(
    option, asynchronous, beside, device, tmp_path, monkeypatch
):
    """Training goes on while copies to the host are under way, and never shows in them."""
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)

    def body(comm):
        model, optimizer = make(comm, device, **OPTIONS[option])
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        for number in range(3):
            step(model, optimizer, comm, device, number)
        saving = save_checkpoint(
            tmp_path / "run", model, optimizer, step=1, asynchronous=asynchronous
        )
        for number in range(3, 5):
            step(model, optimizer, comm, device, number)
        if asynchronous:
            saving.wait()
        after = state_of(model, optimizer)
        loaded = load_checkpoint(tmp_path / "run", model, optimizer, step=1)
        assert loaded.step == 1
        again = state_of(model, optimizer)
        for number in range(3, 5):
            step(model, optimizer, comm, device, number)
        repeated = state_of(model, optimizer)
        # Another model, which has taken the same three steps and nothing else.
        other, its_optimizer = make(comm, device, **OPTIONS[option])
        for number in range(3):
            step(other, its_optimizer, comm, device, number)
        return state_of(other, its_optimizer), again, after, repeated

    for then, again, after, repeated in StreamWorld(2, device).run(body):
        assert_equal(again, then)
        assert_equal(repeated, after)
        assert not all(torch.equal(a, b) for a, b in zip(after, then, strict=True))


@pytest.mark.parametrize("option", OPTIONS)
def test_state_dicts_on_the_host(option, device):
    """Whole and sharded, of the model and its optimizer, given back to another model."""

    def body(comm, options):
        model, optimizer = make(comm, device, **OPTIONS[option])
        for number in range(2):
            step(model, optimizer, comm, device, number)
        weights = get_model_state_dict(model, options=options)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        if options.cpu_offload:
            assert all(value.device.type == "cpu" for value in weights.values())
        expected = state_of(model, optimizer)
        other, its_optimizer = make(comm, device, **OPTIONS[option])
        set_model_state_dict(other, weights, options=options)
        set_optimizer_state_dict(other, its_optimizer, state, options=options)
        assert_equal(state_of(other, its_optimizer), expected)

    # (Sharded ones share the memory of the first model, and are copied by the second.)
    for options in (
        StateDictOptions(full_state_dict=True, cpu_offload=False),
        StateDictOptions(),
    ):
        LocalWorld(2).run(lambda comm, options=options: body(comm, options))


def test_a_file_of_weights(device, tmp_path):
    def body(comm):
        model, optimizer = make(comm, device)
        step(model, optimizer, comm, device, 0)
        save_full_weights(model, tmp_path / "weights.safetensors")
        expected = full_parameters(model)
        other, _ = make(comm, device)
        load_full_weights(other, tmp_path / "weights.safetensors")
        return expected, full_parameters(other)

    for expected, found in LocalWorld(2).run(body):
        file = load_file(tmp_path / "weights.safetensors")
        assert file.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value)
            assert torch.equal(file[name], value)


@pytest.fixture
def one_rank(device, tmp_path):
    """With a way for what rests on the host, too."""
    with world_of_one(device, tmp_path, "cpu:gloo,cuda:nccl") as group:
        yield group


def test_whole_state_dicts_over_nccl(one_rank, device):
    """As scripts for FSDP1 and FSDP2 write them, with ``cpu_offload`` and ``rank0_only``."""
    model = FullyShardedDataParallel(build(device, torch.float32), use_orig_params=True)
    train(model, 0, 1, device)
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        weights = model.state_dict()
    other = shard(
        build(device, torch.float32), None, mp_policy=MixedPrecisionPolicy(torch.bfloat16)
    )
    optimizer = torch.optim.AdamW(other.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    set_model_state_dict(other, dict(weights), options=options)  # torch 2.11 changes the dict
    found = get_model_state_dict(other, options=options)
    assert {value.device.type for value in found.values()} == {"cpu"}
    for name, value in weights.items():
        assert value.device.type == "cpu"
        assert torch.equal(found[name], value)
        assert torch.equal(other.get_parameter(name).full_tensor().cpu(), value)
    train(other, 0, 1, device)
    assert get_optimizer_state_dict(other, optimizer, options=options)["param_groups"]
