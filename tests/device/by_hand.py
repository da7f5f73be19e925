# SPDX-License-Identifier: Apache-2.0
"""Programs of users who gather, read, reduce or wait by hand, between steps or within one."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from device.programs import (
    BF16,
    FETCHES,
    OnTwoStreams,
    Stack,
    adamw,
    gpt,
    program,
    shard,
    wrapped,
)
from fullshard import torch as ours


def layers(kind, count, width=8, device="cuda"):
    with torch.device(device):
        return kind([nn.Linear(width, width) for _ in range(count)])


def run_layers(model, order):
    model.order = order
    return model(torch.zeros(2, model.blocks[0].in_features, device="cuda")).sum()


# ---- gathers ------------------------------------------------------------------------------------


@program("an optimizer before gathers are there", kept_bytes=299_008)
def _(job):
    model = shard(gpt(), job.mesh)
    job.train(model, before_step=lambda _: model.blocks[0].unshard(async_op=True))


@program("kept after backward", kept_bytes=614_400)
def _(job):
    model = shard(gpt(), job.mesh)
    model.set_reshard_after_backward(False)
    job.train(model, each_step=lambda _: [job.loss(model).backward() for _ in range(2)])


@program("an event after the optimizer")
def _(job):
    model = shard(gpt(), job.mesh)
    optimizer, beside = torch.optim.SGD(model.parameters(), lr=1.0), torch.cuda.Stream()
    job.begin()
    for _ in range(job.steps):
        job.loss(model).backward()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            optimizer.step()
            model.set_post_optim_event(beside.record_event())
    torch.cuda.current_stream().wait_stream(beside)
    optimizer.zero_grad()
    job.at_rest(model)


@program("unshard by handle")
def _(job):
    model = shard(gpt(), job.mesh)

    def look(_):
        handle = model.blocks[0].unshard(async_op=True)
        weight = torch.zeros(96, 96, device="cuda")  # meanwhile
        handle.wait()
        (model.blocks[0].mlp[0].weight[:96] + weight).sum()
        model.blocks[0].reshard()

    job.train(model, before_step=look)


@program("use after a reshard by hand")
def _(job):
    model = shard(gpt(), job.mesh, reshard_after_forward=False)

    def each_step(_):
        loss = job.loss(model)
        model.blocks[0].reshard()
        model.reshard()
        loss.backward()

    job.train(model, each_step=each_step)


@program("gathers ahead by lists", steps=3)
def _(job):
    model = gpt()
    ours.fully_shard(model.embed, mesh=job.mesh, check_values=False)
    shard(model, job.mesh)
    first, last = model.blocks
    first.set_modules_to_forward_prefetch([last])
    last.set_modules_to_backward_prefetch([first, model.embed])
    model.embed.set_unshard_in_backward(False)
    job.train(model)


@program("a pool of memory")
def _(job):
    model = shard(gpt(), job.mesh, mp_policy=ours.MixedPrecisionPolicy(**BF16))
    ours.use_memory_pool(model)
    job.train(model)


def _two_dtypes(name, **options):
    @program(name)
    def body(job):
        model = layers(Stack, 3, 256)
        for layer in model.blocks:
            layer.bias = nn.Parameter(layer.bias.detach().double())
            layer.forward = partial(_widened, layer)
        shard(model, job.mesh, **options)
        job.train(model, each_step=lambda _: run_layers(model, range(3)).backward())


_two_dtypes("two dtypes in a unit")
_coded = ours.CommunicationCompression(gather="int8", reduce="int8")
_two_dtypes("two dtypes in a unit, gathers and reduces in int8", compression=_coded)


def _widened(layer, x):
    return (x @ layer.weight + layer.bias).float()


def _through(collective):
    """``collective`` as a user's own, whose work the engine waits for."""

    def call(output_tensor, input_tensor, group, async_op, **options):
        return collective(output_tensor, input_tensor, group=group, async_op=async_op, **options)

    return call


@program("collectives of the user's", shape=(2, 2))
def _(job):
    model = shard(gpt(), job.mesh)
    for block in model.blocks:
        block.set_custom_all_gather(_through(dist.all_gather_into_tensor))
        block.set_custom_reduce_scatter(_through(dist.reduce_scatter_tensor))
    job.train(model)


@program("communication hooks")
def _(job):
    model = wrapped(gpt("cpu"), job.mesh, device_id=0)

    def hook(group, flat, shard):
        dist.reduce_scatter_tensor(shard, flat, group=group, async_op=True).wait()
        shard.div_(4)

    model.register_comm_hook(job.mesh.get_group(), hook)
    job.train(model)


class Half(torch.Tensor):
    """Rests in fp32 and travels in bf16, by FSDP2's protocol for tensor classes."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Half(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(args[0].inner))

    def fsdp_pre_all_gather(self, mesh):
        return (self.inner.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs, notes, dtype, *, out=None):
        if out is not None:
            out.data.copy_(outputs[0])
            return None
        made = outputs[0].to(dtype)
        return made, (made,)


@program("a class that decides what travels")
def _(job):
    model = layers(Stack, 3, 16)
    for layer in model.blocks:
        layer.weight = nn.Parameter(Half(layer.weight.detach()))
    shard(model, job.mesh)
    job.train(model, each_step=lambda _: run_layers(model, range(3)).backward())


@program("a class that decides what travels, from the host to two streams", syncs=FETCHES)
def _(job):
    model = OnTwoStreams(4)
    for layer in model.layers:
        layer.weight = nn.Parameter(Half(layer.weight.detach()))
    for module in (*model.layers, model):
        ours.fully_shard(
            module, mesh=job.mesh, check_values=False, offload_policy=ours.CPUOffloadPolicy()
        )
    x = torch.zeros(2, 96, device="cuda")
    job.train(model, loss=lambda model: model(x).square().mean())


@program("gathers in int8 from the host, on two streams", steps=4, syncs=FETCHES)
def _(job):
    model, options = OnTwoStreams(4), {"offload_policy": ours.CPUOffloadPolicy()}
    options["compression"] = ours.CommunicationCompression(gather="int8")
    for module in (*model.layers, model):
        ours.fully_shard(module, mesh=job.mesh, check_values=False, **options)
    x = torch.zeros(2, 96, device="cuda")
    job.train(model, loss=lambda model: model(x).square().mean())


class OneLayerOnTwoStreams(nn.Module):
    """Runs its second layer on two streams, neither of which waits for the other."""

    def __init__(self):
        super().__init__()
        self.layers = layers(nn.ModuleList, 3, 96)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x):
        first, shared, last = self.layers
        x, current, results = first(x), torch.cuda.current_stream(), []
        for stream in self.streams:
            stream.wait_stream(current)
        for stream in self.streams:
            with torch.cuda.stream(stream):
                results.append(shared(x))
        for stream in self.streams:
            current.wait_stream(stream)
        return last(sum(results))


@program("one layer on two streams, kept", steps=3)
def _(job):
    model = OneLayerOnTwoStreams()
    for module in (*model.layers, model):
        ours.fully_shard(module, mesh=job.mesh, check_values=False, reshard_after_forward=False)
    x = torch.zeros(2, 96, device="cuda")
    job.train(model, loss=lambda model: model(x).square().mean())


# ---- gradients ----------------------------------------------------------------------------------


@program("micro-batches on two streams in turn, reduces left under way")
def _(job):
    model = nn.Sequential(*layers(nn.ModuleList, 4, 96))
    for module in (*model, model):
        ours.fully_shard(module, mesh=job.mesh, check_values=False)
    x, streams = torch.zeros(2, 96, device="cuda"), [torch.cuda.Stream(), torch.cuda.Stream()]

    def each_step(_):
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        for number in range(4):
            model.set_is_last_backward(number == 3)
            stream, other = streams if number % 2 else streams[::-1]
            with torch.cuda.stream(stream):
                loss = model(x).square().mean()
                stream.wait_stream(other)  # gradients are added up in turn
                loss.backward()
        for stream in streams:
            current.wait_stream(stream)

    job.train(model, each_step=each_step)


@program("a frozen parameter changes beside steps of its unit, offloaded", steps=3, syncs=FETCHES)
def _(job):
    """It is fetched for backward still when the host is through."""
    model = gpt("cpu")
    frozen = [block.mlp[0].weight for block in model.blocks]
    for param in frozen:
        param.requires_grad_(False)
    model = shard(model, job.mesh, offload_policy=ours.CPUOffloadPolicy())
    optimizer = adamw(model)
    ours.overlap_optimizer(model, optimizer)

    def before_step(_):
        for block in model.blocks:
            nn.init.zeros_(block.mlp[0].weight)

    job.train(model, optimizer, before_step=before_step)


@program("hooks on parameters", syncs=FETCHES)
def _(job):
    model = shard(gpt("cpu"), job.mesh, offload_policy=ours.CPUOffloadPolicy())
    for param in model.blocks[0].parameters():
        param.register_hook(lambda grad: grad * 2)
    for param in model.blocks[1].parameters():
        param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))
    job.train(model)


def _gathered_ahead(name, *, device="cuda", syncs=(), **options):
    @program(name, steps=8, syncs=syncs)
    def body(job):
        model = shard(layers(Stack, 5, device=device), job.mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ours.overlap_optimizer(model, optimizer)
        # Those that are over then.
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[2], model.blocks[3]])
        orders = [(0, 1, 2, 3, 4), (0, 2, 3), (0, 1, 2, 3, 4), (4, 1, 0, 3), (3, 4), (0, 1, 2, 4)]

        def each_step(number):
            run_layers(model, [*orders, (0, 1, 0, 2), (2, 1, 2, 0)][number]).backward()

        job.train(model, optimizer, each_step=each_step)


_gathered_ahead("optimizer in backward, units gathered ahead")
_gathered_ahead(
    "optimizer in backward, units gathered ahead, offloaded",
    device="cpu",
    syncs=FETCHES,
    offload_policy=ours.CPUOffloadPolicy(),
)


@program("scaled losses, unscaled", syncs=("_local_scalar_dense in the program",))
def _(job):
    model = shard(gpt(), job.mesh)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cuda")
    job.begin()
    for _ in range(job.steps):
        scaler.scale(job.loss(model)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    job.at_rest(model, optimizer)


# ---- values -------------------------------------------------------------------------------------


@program("full tensors between steps")
def _(job):
    model = shard(gpt(), job.mesh)

    def look(_):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                sum(param.full_tensor().sum() for param in model.parameters())

    job.train(model, before_step=look)


def _sizes_of(params):
    values = [param.sum() + param.norm() + param.abs().max() + param.mean() for param in params]
    values += [(param.grad != 0).any() for param in params]
    return sum(values) + sum(param.std() for param in params)


@program("sums of parameters")
def _(job):
    model = shard(gpt(), job.mesh)
    job.train(model, before_step=lambda _: _sizes_of(list(model.blocks.parameters())))


@program("sums of parameters at the first door")
def _(job):
    model = wrapped(gpt("cpu"), job.mesh, device_id=0, use_orig_params=True)
    job.train(model, before_step=lambda _: _sizes_of(list(model.parameters())))


@program("penalties on parameters")
def _(job):
    model = shard(gpt(), job.mesh)

    def loss(model):
        return job.loss(model) + sum(param.square().sum() for param in model.blocks.parameters())

    job.train(model, loss=loss)


@program("tensor parallelism", shape=(2, 2))
def _(job):
    model = gpt()
    for block in model.blocks:
        cut = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, job.mesh["shard"], cut)
    shard(model, job.mesh["replicate"])
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    job.train(model, before_step=lambda _: clip())


# ---- inputs -------------------------------------------------------------------------------------


class WithLengths(nn.Linear):
    """Takes lengths that belong on the host."""

    def forward(self, x, lengths):
        assert x.is_cuda
        assert lengths.device.type == "cpu"
        return super().forward(x)


@program("inputs that rest on the host")
def _(job):
    """The outermost unit's go to the device, as FSDP2's do; those of units inside stay."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.device("cuda"):
                self.blocks = nn.ModuleList(WithLengths(8, 8) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x, torch.ones(2))
            return x

    model = shard(Model(), job.mesh)
    job.train(model, loss=lambda model: model(torch.zeros(2, 8)).sum())
