# SPDX-License-Identifier: Apache-2.0
"""Nothing is read before it is there, nothing freed or changed while it is under way."""

from itertools import product

import pytest
import torch
from gpu.stream_world import (
    LateCopies,
    StreamWorld,
    own_stream,
    poison_buffers,
    sleep_on,
)
from gpu.training import assert_same, build, cases, full_parameters, plain, shard, train
from support import beside
from support.accumulation import (
    halves_each_reduced,
    halves_overlapping,
    halves_without_communication,
)
from support.beside import grid
from support.models import Block, loss_of, make_batches, seeded
from torch import nn

from fullshard.torch import (
    CPUOffload,
    CPUOffloadPolicy,
    fully_shard,
    set_prefetch,
)
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.unit.guards.writes import Writes


def wrapped(model, where, **options):
    return beside.shard(model, where, "wrapper", [Block], **options)


def prefetching(forward, backward):
    def door(comm, model):
        shard(model, comm)
        set_prefetch(model, forward, backward)
        return model

    return door


# By name: how many ranks, and how the model is sharded over them.
WAYS = {
    "full": (2, lambda comm, model: shard(model, comm)),
    "full over 3": (3, lambda comm, model: shard(model, comm)),
    "no prefetch": (2, prefetching(0, 0)),
    "deep prefetch": (2, prefetching(3, 3)),
    "kept after forward": (2, lambda comm, model: shard(model, comm, reshard_after_forward=False)),
    "blocks of 2": (4, lambda comm, model: shard(model, comm, reshard_after_forward=2)),
    "hybrid": (4, lambda comm, model: shard(model, grid(comm))),
    "offload": (2, lambda comm, model: shard(model, comm, offload_policy=CPUOffloadPolicy())),
    "offload unpinned": (
        2,
        lambda comm, model: shard(model, comm, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    ),
    "offload hybrid": (
        4,
        lambda comm, model: shard(model, grid(comm), offload_policy=CPUOffloadPolicy()),
    ),
    "offload optimizer": (
        2,
        lambda comm, model: wrapped(model, comm, cpu_offload=CPUOffload(offload_optimizer=True)),
    ),
}


def steps_of(way, device, monkeypatch, each_step=None):
    """Parameters of every rank after training, all copies and collectives late and poisoned."""
    size, door = WAYS[way]
    poison_buffers(monkeypatch)
    copies = LateCopies(monkeypatch, device)
    world = StreamWorld(size, device)

    def body(comm):
        model = door(comm, build(device))
        options = {} if each_step is None else {"each_step": each_step}
        train(model, comm.rank, comm.size, device, **options)
        return full_parameters(model)

    found = world.run(body)
    assert world.issued > 50
    assert (copies.count > 0) == ("offload" in way)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_late_and_poisoned_steps_equal_one_process(way, device, monkeypatch):
    expected = plain(WAYS[way][0], device)
    for found in steps_of(way, device, monkeypatch):
        assert_same(found, expected)


@pytest.mark.parametrize("way", ["full", "hybrid", "offload"])
@pytest.mark.parametrize(
    "each_step",
    [halves_without_communication, halves_each_reduced, halves_overlapping],
    ids=lambda step: step.__name__,
)
def test_accumulation_under_late_collectives(way, each_step, device, monkeypatch):
    expected = plain(WAYS[way][0], device)
    for found in steps_of(way, device, monkeypatch, each_step):
        assert_same(found, expected)


def test_the_world_notices_who_does_not_wait(device, monkeypatch):
    """Were a wait forgotten somewhere, these tests would fail."""
    # It would refuse what is written late as written by forward.
    monkeypatch.setattr(Writes, "take_values", lambda writes: None)
    world = StreamWorld(2, device)

    def body(comm):
        model = shard(build(device), comm)
        tokens, _ = make_batches("gpt", 1, 2)[0]
        world.careless.add(comm.rank)
        with torch.no_grad():
            return model(tokens.to(device)).cpu()

    assert not any(output.isfinite().all() for output in world.run(body))


def test_a_stream_other_than_the_one_it_was_sharded_on(device):
    """Autograd accumulates into a parameter on the stream that it first saw it on."""
    expected = plain(2, device)

    def body(comm):
        model = shard(build(device), comm)
        with own_stream(device):
            train(model, comm.rank, comm.size, device)
        return full_parameters(model)

    for found in StreamWorld(2, device).run(body):
        assert_same(found, expected)


def test_backward_on_another_stream_than_forward(device):
    """Gradients are there for the stream that is current when ``backward`` returns."""

    def body(comm):
        model = shard(build(device), comm)
        tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
        with own_stream(device):
            sleep_on(device)
            loss = loss_of(model(tokens), targets)
        loss.backward()
        return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}

    model = build(device)
    tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
    loss_of(model(tokens), targets).backward()
    expected = {name: p.grad.cpu() for name, p in model.named_parameters()}
    for found in StreamWorld(2, device).run(body):
        assert_same(found, expected)


class Slowly(torch.autograd.Function):
    """Passes on what it gets, late, on the stream where it is called and in backward."""

    @staticmethod
    def forward(ctx, x):
        sleep_on(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        sleep_on(grad.device)
        return grad.clone()


class OnTwoStreams(nn.Module):
    """Runs some of its layers on a stream of its own, beside the others, which are faster."""

    def __init__(self, beside, after):
        super().__init__()
        self.layers = nn.ModuleList(Saving(64) for _ in range(5))
        self.beside, self.after = beside, after

    def forward(self, x):
        apart = [layer for n, layer in enumerate(self.layers) if n in self.beside]
        here = [layer for n, layer in enumerate(self.layers) if n not in self.beside]
        y = z = x
        if self.after:
            y = run(here, y)
        with own_stream(x.device, join=False) as join:
            z = Slowly.apply(run(apart, Slowly.apply(z)))
        if not self.after:
            y = run(here, y)
        join()
        return y + z


def run(layers, x):
    for layer in layers:
        x = layer(x)
    return x


APART = list(
    product(("plain", "offload", "no units", "two backwards"), ((0,), (2,), (0, 3)), (False, True))
)


@pytest.mark.parametrize(
    ("device", "option", "beside", "after"),
    cases(*APART, also_on_cpu=APART[:1]),
    indirect=["device"],
)
def test_parts_on_a_stream_of_their_own(option, beside, after, device, monkeypatch):
    """Memory of a unit goes back behind whoever used it, and reduces come behind all gradients."""
    x = torch.linspace(-1, 1, 4 * 64, dtype=torch.float64).view(4, 64).to(device)

    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            if option == "two backwards" and number % 2 and hasattr(model, "unshard"):
                model.set_requires_gradient_sync(False)
                (0.5 * model(x).square().mean()).backward()
                model.set_requires_gradient_sync(True)
                (0.5 * model(x).square().mean()).backward()
            else:
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return model

    def make():
        return seeded(lambda: OnTwoStreams(beside, after)).double().to(device)

    expected = {name: param.detach().cpu() for name, param in trained(make()).named_parameters()}
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    options = {"offload_policy": CPUOffloadPolicy()} if option == "offload" else {}

    def body(comm):
        model = make()
        for layer in model.layers if option != "no units" else ():
            fully_shard(layer, mesh=comm, **options)
        return full_parameters(trained(fully_shard(model, mesh=comm, **options)))

    for found in StreamWorld(2, device).run(body):
        assert_same(found, expected)


# ---- copies between host and device -------------------------------------------------------------


def offloaded(device, **policy):
    return shard(build(device), SoloComm(), offload_policy=CPUOffloadPolicy(**policy))


@pytest.mark.parametrize("pin_memory", [True, False])
def test_gradients_on_the_host_are_there_when_backward_returns(device, pin_memory, monkeypatch):
    expected = {}
    plain_model = build(device)
    tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
    loss_of(plain_model(tokens), targets).backward()
    for name, param in plain_model.named_parameters():
        expected[name] = param.grad.cpu()
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    model = offloaded(device, pin_memory=pin_memory)
    for times in (1, 2):  # the second adds to what is there
        loss_of(model(tokens), targets).backward()
        found = {name: p.grad.local.clone() for name, p in model.named_parameters()}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], times * value.flatten(), rtol=0, atol=1e-9)


def test_a_hook_sees_gradients_that_are_there(device, monkeypatch):
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    model = offloaded(device)
    seen = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.local.isfinite().all())
        )
    tokens, targets = (t.to(device) for t in make_batches("gpt", 1, 2)[0])
    loss_of(model(tokens), targets).backward()
    assert len(seen) == len(list(model.parameters()))
    assert all(seen)


def test_shards_may_be_changed_on_the_host_as_soon_as_a_step_is_over(device, monkeypatch):
    """A fetch that is still under way must not see what the host writes after an evaluation."""
    model = offloaded(device)
    tokens = make_batches("gpt", 1, 2)[0][0].to(device)
    with torch.no_grad():
        expected = model(tokens).clone()
        if device.type == "cuda":
            torch.cuda.synchronize()
        LateCopies(monkeypatch, device)
        found = model(tokens)
        for param in model.parameters():
            param.local.zero_()
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not model(tokens).any()


def test_an_optimizer_on_the_host_is_seen_by_the_next_forward(device, monkeypatch):
    LateCopies(monkeypatch, device)
    blocks = wrapped(build(device), SoloComm(), cpu_offload=CPUOffload(offload_optimizer=True))
    tokens = make_batches("gpt", 1, 2)[0][0].to(device)
    with torch.no_grad():
        first = blocks(tokens).clone()
        for param in blocks.parameters():
            param.mul_(1.5)
        second = blocks(tokens)
        for param in blocks.parameters():
            param.div_(1.5)
        third = blocks(tokens)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(first, third)


# ---- storage that comes and goes ----------------------------------------------------------------


class Saving(nn.Module):
    """A layer whose backward reads the weight, its transpose and views that forward has saved."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        weight = self.linear.weight
        return torch.tanh(self.linear(x) * weight[0] + weight.t()[1])


def saving_layers(width=64):
    return seeded(lambda: nn.Sequential(*(Saving(width) for _ in range(4)))).double()


@pytest.mark.parametrize("size", [2, 3])
def test_saved_views_are_right_after_others_had_the_memory(size, device):
    x = torch.linspace(-1, 1, 4 * 64, dtype=torch.float64).view(4, 64).to(device)
    reference = saving_layers().to(device)
    reference(x).square().sum().backward()

    def body(comm):
        model = saving_layers().to(device)
        used = []
        for layer in model:
            # Runs before the hook that frees the unit: where its full parameters are now.
            layer.linear.register_forward_hook(lambda m, *_: used.append(_range_of(m.weight)))
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        loss = model(x).square().sum()
        # As large as a unit, and kept: they get the memory that the units have given back.
        strangers = [
            torch.full((64 * 64 + 64,), float("nan"), dtype=torch.float64, device=device)
            for _ in range(2 * len(model))
        ]
        taken = [_range_of(stranger) for stranger in strangers]
        reused = sum(any(a < d and c < b for c, d in taken) for a, b in used)
        loss.backward()
        assert all(stranger.isnan().all() for stranger in strangers)
        return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}, reused

    expected = {name: p.grad.cpu() for name, p in reference.named_parameters()}
    for found, reused in StreamWorld(size, device).run(body):
        assert_same(found, expected)
        if device.type == "cuda":
            assert reused > 0, "no stranger got memory of a unit, so this has shown nothing"


def _range_of(tensor):
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def test_an_output_kept_by_the_user_does_not_change_under_load(device):
    """Detached outputs of many forwards stay what they were while buffers come and go."""

    def body(comm):
        model = shard(build(device), comm)
        tokens = make_batches("gpt", 1, 2)[0][0].to(device)
        with torch.no_grad():
            outputs = [model(tokens) for _ in range(6)]
        return [torch.equal(outputs[0], output) for output in outputs]

    for same in StreamWorld(2, device).run(body):
        assert all(same)
