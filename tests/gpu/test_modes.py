# SPDX-License-Identifier: Apache-2.0
"""The modes of `docs/modes`, with collectives and copies that are late and poisoned, beside one
process. What `test_streams.py` has is left out here.

The model has parameters above 32 KiB: by rows, their gradients are sent from where autograd made
them, and the others are packed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from gpu.stream_world import LateCopies, StreamWorld, poison_buffers
from gpu.training import (
    assert_same,
    backward_once,
    build,
    cases,
    full_parameters,
    plain,
    shard,
    train,
)
from support import beside
from support.accumulation import halves_overlapping
from support.models import GPT, Block, loss_of, make_batches
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from fullshard.testing import LocalWorld
from fullshard.torch import (
    CommunicationCompression,
    CPUOffload,
    CPUOffloadPolicy,
    ShardingStrategy,
    exchange_matrices,
    fully_shard,
    keep_for_double_backward,
    mark_optional,
    overlap_optimizer,
    summon_full_params,
)

WIDTH = 96


class Routed(GPT):
    """Runs the blocks that are named, in their order."""

    order = (0, 1, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


def recompute(model, reentrant=False):
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    blocks = set(model.blocks)
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=kind),
        check_fn=lambda module: module in blocks,
    )


def by_function(comm, model, **options):
    return shard(model, comm, **options)


def recomputing(comm, model, reentrant=False, **options):
    recompute(model, reentrant)
    return shard(model, comm, **options)


def by_wrapper(comm, model, **options):
    return beside.shard(model, comm, "wrapper", [Block], **options)


def optional(comm, model):
    shard(model, comm)
    mark_optional(*model.blocks)
    return model


def nothing(model, number, rank):
    pass


def in_changing_order(model, number, rank):
    model.order = [(0, 1, 2), (2, 1, 0), (0, 2), (1, 0, 2)][number]


def by_rank(model, number, rank):
    """Rank 1 leaves a block out that rank 0 runs; one that nobody runs has no gradient."""
    model.order = [(0, 1, 2), (0, 2) if rank else (0, 1, 2), (0,), (2, 1) if rank else (0, 2)][
        number
    ]


def freezing(model, number, rank):
    """Frozen from the beginning, and thawed; frozen in between."""
    if number in (0, 2):
        model.embed.weight.requires_grad_(number > 0)
    if number == 1:
        model.blocks[1].requires_grad_(False)


def kept_after_backward(model, number, backward):
    model.set_reshard_after_backward(False)
    backward(0.5)
    model.set_reshard_after_backward(True)
    backward(0.5)


def looked_at(model, number, backward):
    """Evaluations and full parameters between backwards and steps."""
    backward(1.0)
    with torch.inference_mode() if number % 2 else torch.no_grad():
        before = [param.full_tensor().clone() for param in model.parameters()]
        with summon_full_params(model, writeback=True):
            for param, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(param.cpu(), value.cpu())  # offloaded ones are on the device
        tokens = make_batches("gpt", 1, 2)[0][0].to(before[0].device)
        assert model(tokens).isfinite().all()


@contextmanager
def activations_on_the_host():
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        yield


@dataclass(frozen=True)
class Way:
    door: Callable[..., nn.Module] = by_function
    size: int = 2
    before: Callable[..., None] = nothing
    each_step: Callable[..., None] = backward_once
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    tied: bool = False


OFFLOAD = CPUOffloadPolicy()
WAYS = {
    "large parameters": Way(size=3),
    "elements": Way(partial(by_function, align="element")),
    "whole matrices": Way(partial(by_function, align="matrix")),
    "tied": Way(tied=True),
    "SHARD_GRAD_OP": Way(
        partial(by_wrapper, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), tied=True
    ),
    "NO_SHARD": Way(partial(by_wrapper, sharding_strategy=ShardingStrategy.NO_SHARD)),
    "NO_SHARD, offload": Way(
        partial(
            by_wrapper, sharding_strategy=ShardingStrategy.NO_SHARD, cpu_offload=CPUOffload(True)
        )
    ),
    "recomputed": Way(recomputing),
    "recomputed, reentrant": Way(partial(recomputing, reentrant=True)),
    "recomputed, offload": Way(partial(recomputing, offload_policy=OFFLOAD)),
    "activations on the host": Way(around=activations_on_the_host),
    "frozen and thawed": Way(before=freezing),
    "frozen and thawed, offload": Way(
        partial(by_function, offload_policy=OFFLOAD), before=freezing
    ),
    "changing order": Way(before=in_changing_order),
    "changing order, recomputed": Way(recomputing, before=in_changing_order),
    "changing order, offload": Way(
        partial(by_function, offload_policy=OFFLOAD), before=in_changing_order
    ),
    "optional by rank": Way(optional, before=by_rank),
    "not the last backward": Way(each_step=halves_overlapping),
    "kept after backward": Way(each_step=kept_after_backward),
    "looked at": Way(each_step=looked_at),
    "looked at, offload": Way(partial(by_function, offload_policy=OFFLOAD), each_step=looked_at),
}


def model_of(way, device):
    return build(device, kind=Routed, width=WIDTH, tied=way.tied)


FEW = ("large parameters", "recomputed, offload", "changing order", "optional by rank")


@pytest.mark.parametrize(("device", "name"), cases(*WAYS, also_on_cpu=FEW), indirect=["device"])
def test_late_and_poisoned_steps_equal_one_process(name, device, monkeypatch):
    way = WAYS[name]
    expected = plain(way.size, device, model=model_of(way, device), before=way.before)
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)

    def body(comm):
        model = way.door(comm, model_of(way, device))

        def each_step(model, number, backward):
            way.before(model, number, comm.rank)
            with way.around():
                way.each_step(model, number, backward)

        train(model, comm.rank, comm.size, device, each_step=each_step)
        return {
            name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", ""): p
            for name, p in full_parameters(model).items()
        }

    for found in StreamWorld(way.size, device).run(body):
        assert_same(found, expected)


# ---- steps of optimizers -------------------------------------------------------------------------


def steps(model, optimizer, rank, device):
    for number, (inputs, targets) in enumerate(make_batches("gpt", 4, 4)):
        model.order = [(0, 1, 2), (2, 1, 0), (0, 1, 2), (0, 1, 2)][number]
        part = slice(2 * rank, 2 * rank + 2)
        loss_of(model(inputs[part].to(device)), targets[part].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize(
    ("device", "beside", "offloaded"),
    cases(*product(("backward", "forward"), (False, True)), also_on_cpu=[("backward", True)]),
    indirect=["device"],
)
def test_steps_beside_late_copies_and_gathers(beside, offloaded, device, monkeypatch):
    """Bit by bit those after backward, in changing order too."""
    options = {"offload_policy": OFFLOAD} if offloaded else {}

    def body(comm, beside):
        model = shard(build(device, kind=Routed, width=WIDTH), comm, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if beside is not None:
            overlap_optimizer(model, optimizer, beside=beside)
        return steps(model, optimizer, comm.rank, device)

    expected = StreamWorld(2, device).run(lambda comm: body(comm, None))
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    for found, same in zip(
        StreamWorld(2, device).run(lambda comm: body(comm, beside)), expected, strict=True
    ):
        assert_same(found, same, atol=0)


@pytest.mark.parametrize(
    ("device", "way"), cases("owned", "exchanged", also_on_cpu=["exchanged"]), indirect=["device"]
)
def test_muon_beside_late_collectives(way, device, monkeypatch):
    """Bit by bit as with collectives that are complete when they are issued."""

    def body(comm):
        owned = way == "owned"
        model = build(device, torch.float32, width=WIDTH)
        shard(model, comm, align="matrix" if owned else "row")
        hidden = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
        muon = torch.optim.Muon(hidden, lr=0.02)
        if not owned:
            exchange_matrices(muon)
        start = full_parameters(model)
        for inputs, targets in make_batches("gpt", 3, 4):
            part = slice(2 * comm.rank, 2 * comm.rank + 2)
            loss_of(model(inputs[part].to(device)), targets[part].to(device)).backward()
            muon.step()
            model.zero_grad()
        after = full_parameters(model)
        assert not torch.equal(after["blocks.0.mlp.0.weight"], start["blocks.0.mlp.0.weight"])
        return after

    expected = LocalWorld(2, eager=True).run(body)
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    for found, same in zip(StreamWorld(2, device).run(body), expected, strict=True):
        assert_same(found, same, atol=0)


# ---- fewer bits ----------------------------------------------------------------------------------

CHOICES = [
    {"gather": "bf16", "reduce": "bf16"},
    {"gather": "int8", "reduce": "int8"},
    {"gather": "fp8", "reduce": "int8", "error_feedback": True, "block_numel": 64},
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
def test_compressed_steps_are_those_of_a_cpu(choice, gpu, monkeypatch):
    """The same bits come out of the codecs on any device; products differ by their rounding."""
    compression = CommunicationCompression(**choice)

    def outputs(where):
        def body(comm):
            model = shard(build(where, torch.float32, width=WIDTH), comm, compression=compression)
            tokens, targets = (t.to(where) for t in make_batches("gpt", 1, 2)[0])
            loss = loss_of(model(tokens), targets)
            loss.backward()
            grads = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
            return loss.item(), grads

        return StreamWorld(2, where).run(body)

    expected = outputs(torch.device("cpu"))
    poison_buffers(monkeypatch)
    for (loss, grads), (same, same_grads) in zip(outputs(gpu), expected, strict=True):
        assert loss == pytest.approx(same, rel=1e-5)
        for name, value in same_grads.items():
            # A number whose last bit differs may be rounded to the code beside.
            assert (grads[name] - value).norm() <= 1e-2 * value.norm() + 1e-7, name


# ---- a backward through a backward --------------------------------------------------------------


def test_a_penalty_on_gradients(device, monkeypatch):
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH).to(device)

    def make():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*layers).to(device, torch.float64)

    def penalised(model):
        inputs = x.clone().requires_grad_()
        output = model(inputs).square().sum()
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        (output + slope.square().sum()).backward()

    reference = make()
    penalised(reference)
    poison_buffers(monkeypatch)
    values = {name: value.clone() for name, value in reference.state_dict().items()}

    def body(comm):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        ).to(device, torch.float64)
        model.load_state_dict(values)
        for layer in model:
            fully_shard(layer, mesh=comm)
        fully_shard(model, mesh=comm)
        keep_for_double_backward(model)
        penalised(model)
        return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}

    expected = {name: p.grad.cpu() for name, p in reference.named_parameters()}
    for found in StreamWorld(2, device).run(body):
        assert_same(found, expected)
