# SPDX-License-Identifier: Apache-2.0
"""Programs of users, by name: every main mode for some steps on a simulated device."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from support.models import GPT, Nested, Odd, loss_of
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from device.machine import Machine
from device.world import on_device, rank_of_job
from fullshard import torch as ours
from fullshard.core.strategy import Sharding
from fullshard.torch.comm import ranks

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
LAST = -1


@dataclass(frozen=True)
class Program:
    body: Callable
    shape: tuple[int, ...] = (4,)  # of the mesh
    steps: int = 2
    syncs: frozenset[str] = frozenset()  # the functions in which the host may wait
    kept_bytes: int = 0  # on the device from step to step, beyond parameters and their states
    # What ranks that play it learn from each other on the host, by rank: (label, values).
    answers: Callable[[], list[list[tuple[str, list[torch.Tensor]]]]] = lambda: []


PROGRAMS: dict[str, Program] = {}
CONTROLS: dict[str, Program] = {}


def program(name, *, shape=(4,), steps=2, syncs=(), kept_bytes=0, into=PROGRAMS, **further):
    def add(body):
        into[name] = Program(body, shape, steps, frozenset(syncs), kept_bytes, **further)
        return body

    return add


class Job:
    """One rank's side of a program: its mesh, and the machine that watches it."""

    def __init__(self, machine, mesh, steps, rank):
        self.machine, self.mesh, self.steps, self.rank = machine, mesh, steps, rank

    def inputs(self):
        return torch.zeros(2, 8, dtype=torch.long, device="cuda")

    def begin(self):
        """Begin the steps, which may not wait for the device; setting up may."""
        self.machine.syncs.clear()

    def train(self, model, optimizer=None, before_step=None, each_step=None, loss=None):
        optimizer = optimizer or adamw(model)
        self.begin()
        for number in range(self.steps):
            if each_step is not None:
                each_step(number)
            else:
                (loss or self.loss)(model).backward()
            if before_step is not None:
                before_step(number)
            optimizer.step()
            optimizer.zero_grad()
        self.at_rest(model, optimizer)

    def at_rest(self, model, *optimizers):
        """Note what the device holds beyond parameters, buffers and optimizer state."""
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [each for optimizer in optimizers for each in tree_iter(dict(optimizer.state))]
        self.machine.rest_bytes = self.machine.memories.bytes_beyond(tensors)

    def train_by_two(self, model, setting):
        """Train with two micro-batches a step: ``setting`` is False for the first, then True."""

        def each_step(number):
            for value in (False, True):
                setting(value)
                self.loss(model).backward()

        self.train(model, each_step=each_step)

    def loss(self, model):
        x = self.inputs()
        return loss_of(model(x), x)


def run(wanted, rank=0, machine=None):
    """Run one program as ``rank``; returns the machine."""
    size = torch.Size(wanted.shape).numel()
    answers = dict(enumerate(wanted.answers()))
    with rank_of_job(rank, size, machine) as machine:
        names = ("replicate", "shard")[-len(wanted.shape) :]
        mesh = init_device_mesh("cuda", wanted.shape, mesh_dim_names=names)
        # Neither meshes nor groups can be made of fake tensors.
        ranks.ranks_of(mesh, Sharding(True, True, replicated=mesh.ndim == 2))
        machine.answers = list(answers.get(rank, ()))
        with on_device(machine):
            wanted.body(Job(machine, mesh, wanted.steps, rank))
    assert isinstance(machine, Machine)
    if machine.answers:
        machine.find(f"the host has not asked for {machine.answers[0][0]!r}")
    return machine


def gpt(device="cuda", **options):
    with torch.device(device):
        # Three blocks where evictions of one run beside the next and free what the third one takes.
        # So wide that matrices travel by themselves, and vectors packed.
        return GPT(width=96, blocks=3 if device == "cpu" else 2, **options)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def shard(model, mesh, door=None, **options):
    door = door or partial(ours.fully_shard, check_values=False)
    for block in model.blocks:
        door(block, mesh=mesh, **options)
    return door(model, mesh=mesh, **options)


def wrapped(model, mesh, **options):
    blocks = set(model.blocks)
    return ours.FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in blocks,
        **options,
    )


# ---- ways to shard ------------------------------------------------------------------------------

# The host reads gradients and writes shards that rest in its memory.
FETCHES = ("event.synchronize in streams.py:synchronize",)


def _simple(
    name, *, shape=(4,), syncs=(), kept_bytes=0, into=PROGRAMS, door=None, device="cuda", **options
):
    @program(name, shape=shape, syncs=syncs, kept_bytes=kept_bytes, into=into)
    def body(job):
        job.train(shard(gpt(device), job.mesh, door, **options))


_simple("full")
_simple("full over 3", shape=(3,))
_simple("kept after forward", reshard_after_forward=False)
_simple("whole matrices", align="matrix")
_simple("blocks of 2", reshard_after_forward=2)


@program("owned matrices")
def _(job):
    model = shard(gpt(), job.mesh, align="matrix")
    matrices = [p for p in model.blocks.parameters() if p.ownership.owner is not None]
    muon = torch.optim.Muon(matrices, lr=1e-2)
    muon._fullshard_looks_beyond = ((1, False), None)  # tensors here have no values to try it with

    def before_step(_):
        begun.append(len(job.machine.collectives))
        for param in set(model.parameters()).difference(matrices):
            param.grad = None

    begun = []
    muon.register_step_post_hook(lambda *_: begun.append(len(job.machine.collectives)))
    job.train(model, muon, before_step=before_step)
    if begun[::2] != begun[1::2]:
        job.machine.find("a step of owned matrices communicates")


# Once a step the host reads if owners have the right values still, and these rest with them.
@program(
    "exchanged matrices", syncs=("_local_scalar_dense in exchange.py:receive",), kept_bytes=147_456
)
def _(job):
    model = shard(gpt(), job.mesh)
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = set(model.parameters()).difference(matrices)
    muon = torch.optim.Muon(matrices, lr=1e-2)
    muon._fullshard_looks_beyond = ((1, False), None)  # tensors here have no values to try it with
    ours.exchange_matrices(muon)
    job.train(model, muon, before_step=lambda _: [setattr(each, "grad", None) for each in others])
    calls = [kind for _, kind, *_ in job.machine.collectives]
    if calls.count("all_to_all") != len(model.blocks) * (2 * job.steps + 1):
        job.machine.find(f"exchanges take {calls}")


_simple("hybrid", shape=(2, 2))
_simple("bf16", mp_policy=ours.MixedPrecisionPolicy(**BF16))
_simple("bf16 hybrid", shape=(2, 2), mp_policy=ours.MixedPrecisionPolicy(**BF16))
_offload = {"device": "cpu", "syncs": FETCHES}
_simple("offload replicas", shape=(4, 1), **_offload, offload_policy=ours.CPUOffloadPolicy())
_simple("offload", **_offload, offload_policy=ours.CPUOffloadPolicy())
_simple(
    "offload bf16",
    **_offload,
    offload_policy=ours.CPUOffloadPolicy(),
    mp_policy=ours.MixedPrecisionPolicy(**BF16),
)
for _kind in ("bf16", "int8", "fp8"):
    _simple(f"gathers in {_kind}", compression=ours.CommunicationCompression(gather=_kind))
for _kind in ("bf16", "int8"):
    _simple(
        f"reduces in {_kind}",
        kept_bytes=230_400,  # what rounding has left out, for the next reduce
        compression=ours.CommunicationCompression(reduce=_kind, error_feedback=True),
    )
_simple("FSDP2", into=CONTROLS, door=theirs.fully_shard)
_simple("FSDP2 kept", into=CONTROLS, door=theirs.fully_shard, reshard_after_forward=False)
_simple("FSDP2 hybrid", into=CONTROLS, door=theirs.fully_shard, shape=(2, 2))
_simple(
    "FSDP2 bf16",
    into=CONTROLS,
    door=theirs.fully_shard,
    mp_policy=theirs.MixedPrecisionPolicy(**BF16),
)


def _first_door(name, *, shape=(4,), syncs=(), kept_bytes=0, **options):
    @program(name, shape=shape, syncs=syncs, kept_bytes=kept_bytes)
    def body(job):
        job.train(wrapped(gpt("cpu"), job.mesh, device_id=0, **options))


for _strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
    _first_door(_strategy, sharding_strategy=ours.ShardingStrategy[_strategy])
_first_door(
    "NO_SHARD offloaded",
    syncs=FETCHES,
    sharding_strategy=ours.ShardingStrategy.NO_SHARD,
    cpu_offload=ours.CPUOffload(offload_params=True),
)
_first_door(
    "offload optimizer",
    syncs=FETCHES,
    kept_bytes=227_712,  # the shards on the device
    cpu_offload=ours.CPUOffload(offload_optimizer=True),
)


@program("deep prefetch")
def _(job):
    model = shard(gpt(), job.mesh)
    ours.set_prefetch(model, 3, 3)
    job.train(model)


@program("one communicator")
def _(job):
    model = shard(gpt(), job.mesh)
    model.set_separate_reduce_scatter_group(False)
    job.train(model)


# ---- ways to train ------------------------------------------------------------------------------


@program("accumulation without reduces")
def _(job):
    model = shard(gpt(), job.mesh)
    job.train_by_two(model, model.set_requires_gradient_sync)


@program("accumulation offloaded", syncs=FETCHES)
def _(job):
    model = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    job.train(model, each_step=lambda _: [job.loss(model).backward() for _ in range(2)])


@program("reduces left under way")
def _(job):
    model = shard(gpt(), job.mesh)
    job.train_by_two(model, model.set_is_last_backward)


@program("the reduce of a single unit left under way")
def _(job):
    model = ours.fully_shard(gpt(), mesh=job.mesh, check_values=False)
    job.train_by_two(model, model.set_is_last_backward)


@program("reduced when asked for")
def _(job):
    model = shard(gpt(), job.mesh)
    model.set_requires_gradient_sync(False)

    def each_step(number):
        for _ in range(2):
            job.loss(model).backward()
        model.synchronize_gradients()

    job.train(model, each_step=each_step)


@program("experts on one dim of a mesh", shape=(2, 2))
def _(job):
    model = gpt()
    for block in model.blocks:
        ours.fully_shard(block, mesh=job.mesh["shard"], check_values=False)
        block.set_gradient_divide_factor(4)
    job.train(ours.fully_shard(model, mesh=job.mesh, check_values=False))


@program("hybrid accumulation", shape=(2, 2))
def _(job):
    model = shard(gpt(), job.mesh)
    job.train_by_two(model, model.set_requires_all_reduce)


@program("no_sync")
def _(job):
    model = wrapped(gpt("cpu"), job.mesh, device_id=0)

    def each_step(number):
        with model.no_sync():
            job.loss(model).backward()
        job.loss(model).backward()

    job.train(model, each_step=each_step)


@program("optimizer in backward")
def _(job):
    model = shard(gpt(), job.mesh)
    optimizer = adamw(model)
    ours.overlap_optimizer(model, optimizer)
    job.train(model, optimizer)


@program("optimizer in backward, offloaded", steps=3, syncs=FETCHES)
def _(job):
    model = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    optimizer = adamw(model)
    ours.overlap_optimizer(model, optimizer)
    job.train(model, optimizer)


@program("clipped, optimizer beside forward, offloaded", steps=4, syncs=FETCHES)
def _(job):
    """Before the last step somebody changes a parameter, whose step is put off."""
    model = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    optimizer = adamw(model)
    ours.overlap_optimizer(model, optimizer, beside="forward")

    def each_step(number):
        if number == job.steps - 1:
            nn.init.zeros_(model.blocks[1].mlp[0].weight)
        job.loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    job.train(model, optimizer, each_step=each_step)


@program("clipping")
def _(job):
    model = shard(gpt(), job.mesh)
    job.train(model, before_step=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@program("clipping at the first door", shape=(2, 2))
def _(job):
    strategy = ours.ShardingStrategy.HYBRID_SHARD
    model = wrapped(gpt("cpu"), job.mesh, device_id=0, sharding_strategy=strategy)
    job.train(model, before_step=lambda _: model.clip_grad_norm_(1.0))


@program("forwards and backwards crossed")
def _(job):
    model = shard(gpt(), job.mesh)

    def each_step(number):
        first, second = job.loss(model), job.loss(model)
        second.backward()
        first.backward()

    job.train(model, each_step=each_step)


class Broken(Exception):
    pass


@program("an exception in forward")
def _(job):
    model = shard(gpt(), job.mesh)
    fails = []

    def fail(module, args):
        if fails:
            raise Broken

    model.blocks[1].mlp.register_forward_pre_hook(fail)

    def each_step(number):
        fails.append(1)
        with suppress(Broken):
            job.loss(model).backward()
        fails.clear()
        job.loss(model).backward()

    job.train(model, each_step=each_step)


def _failing_backward(job, model):
    fails = []

    def fail(grad):
        if fails:
            raise Broken

    def watch(module, args, output):
        output.register_hook(fail)

    model.blocks[0].mlp.register_forward_hook(watch)

    def each_step(number):
        fails.append(1)
        with suppress(Broken):
            job.loss(model).backward()
        fails.clear()
        job.loss(model).backward()

    job.train(model, each_step=each_step)


@program("an exception in backward")
def _(job):
    _failing_backward(job, shard(gpt(), job.mesh))


@program("an exception in a hybrid backward", shape=(2, 2))
def _(job):
    _failing_backward(job, shard(gpt(), job.mesh))


@program("an exception in an offloaded backward", syncs=FETCHES)
def _(job):
    offloaded = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    _failing_backward(job, offloaded)


def _recomputing(name, reentrant, into=PROGRAMS, door=None):
    @program(name, into=into)
    def body(job):
        model = gpt()
        for block in model.blocks:
            block.forward = partial(
                checkpoint, type(block).forward, block, use_reentrant=reentrant,
                preserve_rng_state=False,
            )  # fmt: skip
        job.train(shard(model, job.mesh, door))


_recomputing("recomputation", False)
_recomputing("reentrant recomputation", True)
_recomputing("FSDP2 recomputation", False, CONTROLS, theirs.fully_shard)


@program("frozen parameters")
def _(job):
    model = gpt()
    for block in model.blocks:
        block.attention.requires_grad_(False)
    job.train(shard(model, job.mesh))


@program("evaluation between steps")
def _(job):
    model = shard(gpt(), job.mesh)

    def evaluate(number):
        with torch.no_grad():
            job.loss(model)

    job.train(model, before_step=evaluate)


@program("evaluation offloaded", syncs=FETCHES)
def _(job):
    model = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    job.begin()
    with torch.no_grad():
        for _ in range(job.steps):
            job.loss(model)
            for param in model.parameters():
                param.mul_(0.5)


@program("a stream of the user's")
def _(job):
    model = shard(gpt(), job.mesh)
    optimizer = adamw(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        job.train(model, optimizer)
    torch.cuda.current_stream().wait_stream(stream)


class OnTwoStreams(nn.Module):
    """Runs its first layer on a stream of its own, beside the others."""

    def __init__(self, layers):
        super().__init__()
        with torch.device("cuda"):
            self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(layers))
        self.stream = torch.cuda.Stream()

    def forward(self, x):
        first, *others = self.layers
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            beside = first(x)
        for layer in others:
            x = layer(x)
        current.wait_stream(self.stream)
        return x + beside


@program("a part on another stream", steps=4)
def _(job):
    model = OnTwoStreams(4)
    for layer in model.layers:
        ours.fully_shard(layer, mesh=job.mesh, check_values=False)
    ours.fully_shard(model, mesh=job.mesh, check_values=False)
    x = torch.zeros(2, 96, device="cuda")
    job.train(model, loss=lambda model: model(x).square().mean())


@program("a part on another stream, two forwards", steps=4)
def _(job):
    """Backward drops some units on another stream than the one that used them."""
    model = OnTwoStreams(4)
    for layer in (*model.layers, model):
        ours.fully_shard(layer, mesh=job.mesh, check_values=False)
    x = torch.zeros(2, 96, device="cuda")

    def each_step(_):
        losses = [model(x).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()

    job.train(model, each_step=each_step)


def _units(model, names, mesh, **options):
    for name in names:
        ours.fully_shard(model.get_submodule(name), mesh=mesh, check_values=False, **options)
    return ours.fully_shard(model, mesh=mesh, check_values=False, **options)


@program("units in units")
def _(job):
    with torch.device("cuda"):
        model = Nested()
    _units(model, ("outer1.inner", "outer1", "outer2.inner.deep", "outer2"), job.mesh)
    job.train(model, loss=lambda model: model(torch.zeros(2, 4, device="cuda")).sum())


@program("odd parameters")
def _(job):
    with torch.device("cuda"):
        model = Odd()
    _units(model, ("part1", "part2"), job.mesh)
    job.train(model, loss=lambda model: model(torch.zeros(2, 3, device="cuda")).sum())


class Stack(nn.Module):
    """Layers that run in the order of ``order``, or not at all."""

    def __init__(self, layers):
        super().__init__()
        self.blocks = nn.ModuleList(layers)
        self.order = range(len(layers))

    def forward(self, x):
        for number in self.order:
            x = self.blocks[number](x)
        return x


_ALL = (0, 1, 2, 3, 4)
ORDERS = [_ALL, (0, 2, 3), _ALL, (4, 1, 0, 3), (3, 4), _ALL, (0, 1, 2, 3), (0, 1, 2, 4)]


def _changing(name, *, shape=(4,), syncs=(), kept_bytes=0, device="cuda", beside="", **options):
    @program(name, shape=shape, steps=len(ORDERS), syncs=syncs, kept_bytes=kept_bytes)
    def body(job):
        with torch.device(device):
            # So wide that memory counts: units that are given up are seen.
            model = Stack([nn.Linear(256, 256) for _ in range(5)])
        shard(model, job.mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=bool(beside))
        if beside:
            ours.overlap_optimizer(model, optimizer, beside=beside)

        def each_step(number):
            model.order = ORDERS[number]
            model(torch.zeros(2, 256, device="cuda")).sum().backward()

        job.train(model, optimizer, each_step=each_step)


_changing("blocks dropped and in changing order")
_changing("changing order in bf16", mp_policy=ours.MixedPrecisionPolicy(**BF16))
_changing(
    "changing order, gathers in int8", compression=ours.CommunicationCompression(gather="int8")
)
_changing("changing order, blocks of 2", reshard_after_forward=2)
_changing("changing order, optimizer beside forward", beside="forward")
_changing(
    "changing order, optimizer beside forward, offloaded",
    **_offload,
    beside="forward",
    offload_policy=ours.CPUOffloadPolicy(),
)


@program("changing order, NO_SHARD in bf16", steps=len(ORDERS))
def _(job):
    """One slice is cast by nobody but this rank, and no communicator follows the casts."""
    with torch.device("cuda"):
        stack = Stack([nn.Linear(256, 256) for _ in range(5)])
    precision = ours.MixedPrecision(torch.bfloat16, torch.bfloat16)
    strategy = ours.ShardingStrategy.NO_SHARD
    model = wrapped(stack, job.mesh, sharding_strategy=strategy, mixed_precision=precision)

    def each_step(number):
        stack.order = ORDERS[number]
        model(torch.zeros(2, 256, device="cuda")).sum().backward()

    job.train(model, torch.optim.SGD(model.parameters(), lr=0.1), each_step=each_step)


class Following(Stack):
    """Each layer's weights follow the first one's, before any but the first runs."""

    def forward(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            for layer in self.blocks[1:]:
                layer.weight.lerp_(self.blocks[0].weight, 0.1)
        for number in self.order[1:]:
            x = self.blocks[number](x)
        return x


@program("changing order, weights written in forward", steps=len(ORDERS))
def _(job):
    with torch.device("cuda"):
        model = Following([nn.Linear(96, 96) for _ in range(5)])
    shard(model, job.mesh, mp_policy=ours.MixedPrecisionPolicy(**BF16))

    def each_step(number):
        model.order = ORDERS[number]
        model(torch.zeros(2, 96, device="cuda")).sum().backward()

    job.train(model, each_step=each_step)


@program("changing order, an event after the optimizer", steps=len(ORDERS))
def _(job):
    with torch.device("cuda"):
        model = Stack([nn.Linear(96, 96) for _ in range(5)])
    shard(model, job.mesh, mp_policy=ours.MixedPrecisionPolicy(**BF16))
    optimizer, beside = torch.optim.SGD(model.parameters(), lr=1.0), torch.cuda.Stream()
    job.begin()
    for model.order in ORDERS:
        model(torch.zeros(2, 96, device="cuda")).sum().backward()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            optimizer.step()
            model.set_post_optim_event(beside.record_event())
    torch.cuda.current_stream().wait_stream(beside)
    optimizer.zero_grad()
    job.at_rest(model)


class Branches(Stack):
    """Layers side by side: all run, those in ``order`` count."""

    def forward(self, x):
        results = [layer(x) for layer in self.blocks]
        return sum(results[number] for number in self.order)


@program("branches that only some ranks use", steps=4)
def _(job):
    with torch.device("cuda"):
        model = Branches([nn.Linear(8, 8) for _ in range(5)])
    shard(model, job.mesh)
    orders = [((0, 1, 2, 3, 4), (0, 2)), ((0, 2, 3), (1, 3, 4)), ((4,), (0,)), ((1, 3), (1, 2))]

    def each_step(number):
        model.order = orders[number][job.rank % 2]
        model(torch.zeros(2, 8, device="cuda")).sum().backward()

    job.train(model, each_step=each_step)


def _at_rest_elsewhere(job, model, move):
    """Between steps shards go to the host and back, and the device's memory is free meanwhile."""
    params = list(model.parameters())

    def leave_and_return(_):
        for device in ("cpu", "cuda"):
            move(torch.device(device))
            assert {param.local.device.type for param in params} == {device}
        assert all(a is b for a, b in zip(model.parameters(), params, strict=True))

    job.train(model, before_step=leave_and_return)


_TO_HOST = ("a blocking copy_ in shards.py:_shard_one", "a blocking _to_copy in changes.py")


@program("moved by handles", syncs=_TO_HOST)
def _(job):
    model = wrapped(gpt(), job.mesh)

    def move(device):
        for handle in model._all_handles:
            handle.flat_param_to(device, non_blocking=True)

    _at_rest_elsewhere(job, model, move)


@program("moved by to", syncs=(*_TO_HOST, "a blocking _to_copy in module.py:_having_moved"))
def _(job):
    model = shard(gpt(), job.mesh)
    _at_rest_elsewhere(job, model, model.to)


@program("full parameters between steps")
def _(job):
    model = wrapped(gpt("cpu"), job.mesh, device_id=0)

    def look(number):
        with ours.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            model.module.head.weight.sum()

    job.train(model, before_step=look)


@program("a hook on the all-reduce's stream", shape=(2, 2))
def _(job):
    model = shard(gpt(), job.mesh)
    stream = torch.cuda.Stream()
    for block in model.blocks:
        block.set_all_reduce_hook(lambda flat: flat.mul_(2), stream=stream)
    job.train(model)


@program("scaled losses", syncs=("_local_scalar_dense in the program",))
def _(job):
    half = ours.MixedPrecisionPolicy(param_dtype=torch.float16)
    model = shard(gpt(), job.mesh, mp_policy=half)
    optimizer, scaler = adamw(model), ours.ShardedGradScaler(process_group=job.mesh.get_group())
    job.begin()
    for _ in range(job.steps):
        scaler.scale(job.loss(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    job.at_rest(model, optimizer)
