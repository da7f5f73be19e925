# SPDX-License-Identifier: Apache-2.0
"""Programs that compute with sharded parameters: by element, by row, and on two axes."""

import copy
import pickle
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from device.around import run_through
from device.by_hand import layers
from device.programs import Stack, program, shard, wrapped
from fullshard.core.errors import FullshardError
from fullshard.torch.tensor import ownership

# What scalars are for, the texts that ranks compare, and what the first forward looks at.
LISTENS = (
    *("_local_scalar_dense in the program", "is_nonzero in global_rules.py"),
    *("agreement.py", "writes.py:check"),
)


def refused(job, *calls):
    """Each of ``calls`` raises an error of fullshard's, before it does anything."""
    for number, call in enumerate(calls):
        before = len(job.machine.collectives)
        try:
            call()
        except (FullshardError, AttributeError):
            if len(job.machine.collectives) != before:
                job.machine.find(f"refusal {number} communicates")
        else:
            job.machine.find(f"call {number} is not refused")


def _two(job, *dtypes, width=66, **options):
    """The weights of layers that are sharded and never run."""
    model = Stack([nn.Linear(width, width, device="cuda", dtype=each) for each in dtypes])
    shard(model, job.mesh, **options)
    job.begin()
    return [block.weight for block in model.blocks]


def _everywhere(job, name, numbers):
    """Scalars that ranks have in common: all of them came by collectives."""
    before = len(job.machine.collectives)
    for number in numbers():
        if number.dim():
            job.machine.find(f"{name} is no scalar")
    if len(job.machine.collectives) == before:
        job.machine.find(f"{name} sends nothing")


# ---- by element ---------------------------------------------------------------------------------


@torch.no_grad()
def _on_spans(weight, other):
    torch.add(weight, other=other, alpha=2), torch.where(weight > 0, weight, other)
    torch.addcmul(weight, other, other, value=0.5, out=torch.empty_like(weight))
    torch.frexp(weight), weight.copy_(torch.zeros(weight.shape, device="cuda"))
    weight[3].mul_(2), weight[8:16].zero_(), weight.narrow(0, 1, 8).add_(1), weight.view(33, 132)
    torch.index_put(weight, [weight > 1], torch.zeros((), device="cuda"))
    nn.functional.pad(weight, (0, 0)), torch.rand_like(weight), nn.init.eye_(weight)
    torch._foreach_add([weight, other], [other, weight]), torch._foreach_sqrt([weight, other])
    plain = torch.zeros(3, device="cuda")
    torch._foreach_add_([weight, plain], [other, plain]), torch._foreach_mul([weight, plain], 2.0)
    torch._foreach_mul_([weight, other], [2.0, 3.0])
    torch._foreach_addcdiv_([weight, other], [other, weight], [weight, other], scalars=[1.0, 2.0])
    weight.data = other
    weight.data = weight
    values = {"weight": weight, "same": weight}
    copy.deepcopy(values), copy.copy(weight), repr(weight), weight.to_local(), weight.data
    nn.functional.huber_loss(weight, other, reduction="none").flatten()


@program("operations by element", syncs=LISTENS)
def _(job):
    weight, other = _two(job, None, None, align="element")
    _on_spans(weight, other)
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(weight, order) for order in (0, 1, 2, float("-inf"))]
        _everywhere(job, "a norm", lambda: [*norms, weight.norm(1), weight.detach().norm()])
        _everywhere(
            job,
            "a statistic",
            lambda: (
                *(weight.std(), weight.median(), weight.argmax(), weight.prod(), weight.amax()),
                *(weight.amin((0, 1)), weight.mean(), weight.sum(dtype=torch.float64)),
                *((weight > 0).sum(), (weight > 0).all(), (weight.int()).max()),
            ),
        )
        _everywhere(job, "a loss", lambda: [nn.functional.mse_loss(weight, other)])
        _ = torch.equal(weight, other), torch.allclose(weight, other)
        _ = torch.equal(weight, other[:8])


@program("operations by element that are refused")
def _(job):
    weight, other = _two(job, None, None, align="element")
    plain = torch.zeros(66, 66, device="cuda")
    with torch.no_grad():
        refused(
            job,
            lambda: weight @ weight,
            lambda: torch.stack([weight, other]),
            lambda: weight + plain[0],
            lambda: torch.add(weight, 1, out=plain),
            lambda: plain.copy_(weight),
            lambda: torch._foreach_copy_([plain], [weight]),
            lambda: torch._foreach_max([weight]),
            lambda: weight.norm(dim=0),
            lambda: weight.sum(0),
            lambda: weight.any(0),
            lambda: weight.amax(0),
            lambda: weight.max(0),
            lambda: weight.std(0),
            lambda: weight.view(torch.int32),
            lambda: weight[:, 3],
            lambda: weight[weight > 0],
            lambda: weight.index_put_([torch.tensor([1])], torch.zeros(66)),
            lambda: nn.functional.pad(weight, (1, 0)),
            lambda: torch.bernoulli(weight),
            lambda: torch.eye(3, 4, out=weight),
            lambda: weight[1:34] + weight[:33],
            lambda: weight.placements,
            lambda: setattr(weight, "data", plain[:3]),
            lambda: pickle.dumps(weight),
            lambda: weight.share_memory_(),
            lambda: weight.apply_(abs),
            lambda: weight.__dlpack__(),
        )


@program("complex parameters", syncs=LISTENS)
def _(job):
    """Which NCCL does not know."""
    weight, other = _two(job, torch.complex64, torch.complex64, align="element")
    with torch.no_grad():
        torch.view_as_complex(torch.view_as_real(weight)).mul_(2)
        _everywhere(job, "a sum", lambda: [weight.sum(), weight.norm(), weight.mean()])
        nn.utils.get_total_norm([weight, other]), weight.full_tensor()


# ---- by row -------------------------------------------------------------------------------------


@program("operations by row", syncs=LISTENS)
def _(job):
    """Some by our rules, the others by DTensor's own dispatch; a rank of four has no row."""
    weight, other = _two(job, None, None)
    few = _two(job, None, width=3)[0]
    with torch.no_grad():
        product = weight @ other
        if not isinstance(product, DTensor):
            job.machine.find("a product of parameters is no DTensor")
        weight.add_(product), product.sum(), (few @ few).argmax(), weight.t().contiguous()
        weight[:, 3], weight.sum(0), product + weight, product.t() @ weight
        weight.masked_fill_(weight > 0, 0.0), weight.cumsum(0), torch.softmax(weight, 1)
        pickle.dumps(weight.shape), copy.deepcopy(weight), repr(weight).startswith("Sharded")
        weight.redistribute(placements=[Replicate()]), weight.redistribute(placements=[Shard(1)])
        weight.copy_(distribute_tensor(torch.zeros(66, 66, device="cuda"), weight.device_mesh))
        weight.copy_(other.redistribute(placements=[Shard(1)]))
        plain = torch.zeros(66, 66, device="cuda")
        refused(
            job,
            lambda: weight + plain[0],
            lambda: product + plain,
            lambda: few.t().zero_(),
            lambda: weight.view(-1, 33),
            lambda: torch.add(weight, 1, out=plain),
        )
    whole = weight.full_tensor()
    whole.sum().backward()
    ((weight @ other).sum() + (few @ few).square().sum()).backward()


# ---- on two axes --------------------------------------------------------------------------------


@program("two axes by element", shape=(2, 2), syncs=LISTENS)
def _(job):
    model = layers(Stack, 4, 64)
    styles = ColwiseParallel(), RowwiseParallel()
    cut = {f"blocks.{number}": styles[number % 2] for number in range(4)}
    parallelize_module(model, job.mesh["shard"], cut)
    shard(model, job.mesh["replicate"], align="element")

    def each_step(_):
        run_through(model, 64)
        with torch.no_grad():
            values = {name: each.full_tensor() for name, each in model.named_parameters()}
            model.load_state_dict(values)
            for block in model.blocks:
                block.weight.mul_(0.5).copy_(values["blocks.0.weight"])
                block.weight.copy_(block.weight.detach().clone())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    job.train(model, each_step=each_step)


# ---- state dicts --------------------------------------------------------------------------------


@program("state dicts of rows along another dimension", syncs=LISTENS)
def _(job):
    model = layers(Stack, 2, 64)
    shard(model, job.mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))

    def each_step(_):
        run_through(model, 64)
        values = {name: each.full_tensor() for name, each in model.state_dict().items()}
        model.load_state_dict(values)
        model.load_state_dict(model.state_dict())

    job.train(model, each_step=each_step)


def _whole(name, **options):
    @program(name, syncs=LISTENS)
    def body(job):
        model = wrapped(layers(Stack, 3, 64), job.mesh, **options)

        def look(_):
            before = len(job.machine.collectives)
            model.state_dict()
            kinds = [kind for _, kind, *_ in job.machine.collectives[before:]]
            if kinds.count("all_gather") != len(model.blocks) or "broadcast" in kinds:
                job.machine.find(f"a whole state dict takes {kinds}")

        # As if the matrices were so large that equal parts are no way.
        with mock.patch.object(ownership, "PADDING_BYTES", 0):
            job.train(model, before_step=look, each_step=lambda _: run_through(model, 64))


_whole("whole state dicts")
_whole("whole state dicts of whole matrices", align="matrix")
