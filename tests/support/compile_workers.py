# SPDX-License-Identifier: Apache-2.0
"""Training with compiled blocks, run on the ranks of a `support.world.World`."""

import warnings

import torch
import torch._inductor.config
from support.models import GPT, Block, loss_of, make_batches, seeded
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters

from fullshard.torch import FullyShardedDataParallel, fully_shard, tracing

STEPS = 4


def compile_blocks(model, how, **options):
    """In place by ``block.compile()``, or by putting what torch.compile returns in its place."""
    for number, block in enumerate(model.blocks):
        if how == "method":
            block.compile(**options)
        else:
            model.blocks[number] = torch.compile(block, **options)


def shard(model, group, door, units=(Block,)):
    if door == "wrapper":
        return FullyShardedDataParallel(
            model,
            group,
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, units),
        )
    for block in model.blocks:
        fully_shard(block, mesh=group)
    return fully_shard(model, mesh=group)


def eager(group, door):
    return shard(seeded(GPT).double(), group, door)


def compiled_before(group, door, how, **options):
    model = seeded(GPT).double()
    compile_blocks(model, how, **options)
    return shard(model, group, door)


def compiled_wrapper_is_unit(group, door, how, **options):
    model = seeded(GPT).double()
    compile_blocks(model, how, **options)
    return shard(model, group, door, (Block if how == "method" else OptimizedModule,))


def compiled_after(group, door, how, **options):
    model = shard(seeded(GPT).double(), group, door)
    compile_blocks(model, how, **options)
    return model


def compiled_in_part(group, door, **options):
    model = seeded(GPT).double()
    for block in model.blocks:
        block.attention.compile(**options)
    return shard(model, group, door)


def compiled_whole(group, door, how, **options):
    model = shard(seeded(GPT).double(), group, door)
    if how == "function":
        return torch.compile(model, **options)
    model.compile(**options)
    return model


def train(group, build, door, *how, **options):
    """(losses, parameters, how many graphs there were after each step, the last step's ops)."""
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # a pool of processes would outlive the test
    counters.clear()
    model = build(group, door, *how, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, size = group.rank(), group.size()
    losses, graphs = [], []
    part = slice(2 * rank, 2 * rank + 2)
    once = build is not compiled_whole  # the wrappers of all units have one forward between them
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=once):
        # Tracing looks at .grad of what it finds, be it a leaf or not.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # inductor imports it
        for inputs, targets in make_batches("gpt", STEPS, 2 * size):
            with tracing(getattr(model, "_orig_mod", model)) as trace:
                loss = loss_of(model(inputs[part]), targets[part])
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            graphs.append(counters["stats"]["unique_graphs"])
    params = {
        plain_name(param.ownership.name): param.detach().full_tensor()
        for param in model.parameters()
    }
    return losses, params, graphs, [(record.op, plain_name(record.unit)) for record in trace]


def plain_name(name):
    """Without what torch.compile(module) adds, also in a plain model."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
