# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of blocks, before and after sharding, and of a sharded model."""

import warnings
from functools import partial

import pytest
import torch
import torch._inductor.config
from support.beside import DOORS, grads_of, params_of, shard
from support.models import GPT, Block, loss_of, make_batches, seeded
from support.sampling import survey
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters

from fullshard.testing import LocalWorld
from fullshard.torch import tracing

STEPS = 3


def compile_blocks(model, how, **options):
    """In place by ``block.compile()``, or by putting what torch.compile returns in its place."""
    for number, block in enumerate(model.blocks):
        if how == "method":
            block.compile(**options)
        else:
            model.blocks[number] = torch.compile(block, **options)


def eager(group, door):
    return shard(seeded(GPT).double(), group, door, [Block])


def compiled_before(group, door, how, **options):
    model = seeded(GPT).double()
    compile_blocks(model, how, **options)
    return shard(model, group, door, [Block])


def compiled_wrapper_is_unit(group, door, how, **options):
    model = seeded(GPT).double()
    compile_blocks(model, how, **options)
    return shard(model, group, door, [Block if how == "method" else OptimizedModule])


def compiled_after(group, door, how, **options):
    model = shard(seeded(GPT).double(), group, door, [Block])
    compile_blocks(model, how, **options)
    return model


def compiled_in_part(group, door, **options):
    model = seeded(GPT).double()
    for block in model.blocks:
        block.attention.compile(**options)
    return shard(model, group, door, [Block])


def compiled_whole(group, door, how, **options):
    model = shard(seeded(GPT).double(), group, door, [Block])
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


@pytest.fixture(scope="module")
def in_eager(gloo_world):
    return {door: gloo_world.run(2, train, eager, door) for door in DOORS}


def check(found, expected):
    for (losses, params, _, ops), (eager_losses, eager_params, _, eager_ops) in zip(
        found, expected, strict=True
    ):
        assert losses == pytest.approx(eager_losses, abs=1e-12)
        torch.testing.assert_close(params, eager_params, rtol=0, atol=1e-12)
        assert ops == eager_ops


@pytest.mark.parametrize("how", ["method", "function"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "build",
    [compiled_before, survey(compiled_wrapper_is_unit), compiled_after],
    ids=["before", "wrapper is unit", "after"],
)
def test_blocks_are_one_graph_that_is_compiled_once(gloo_world, in_eager, build, door, how):
    """A break raises, since ``fullgraph`` is asked for; so does a second compilation."""
    runs = gloo_world.run(2, train, build, door, how, backend="aot_eager", fullgraph=True)
    check(runs, in_eager[door])
    for _, _, graphs, _ in runs:
        assert graphs == [1, 1, 1]  # both blocks share it


@pytest.mark.thorough
def test_inductor(gloo_world, in_eager):
    runs = gloo_world.run(2, train, compiled_in_part, "function", fullgraph=True)
    check(runs, in_eager["function"])


def test_a_whole_model_is_compiled_in_parts(gloo_world, in_eager):
    """Graphs end at units; torch leaves a loop over units to Python."""
    runs = gloo_world.run(2, train, compiled_whole, "wrapper", "method", backend="aot_eager")
    check(runs, in_eager["wrapper"])
    for _, _, graphs, _ in runs:
        assert graphs == [1, 1, 1]


def hooked(comm, door, compiled):
    """The gradients of a model whose blocks have hooks inside."""
    model = seeded(GPT).double()
    for block in model.blocks:
        block.attention.register_forward_hook(lambda module, inputs, output: 2 * output)
        if compiled:
            block.compile(backend="eager", fullgraph=True)
    model = shard(model, comm, door, [Block])
    inputs, targets = make_batches("gpt", 1, 2)[0]
    loss_of(model(inputs), targets).backward()
    return grads_of(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("door", DOORS)
def test_hooks_inside_of_blocks_do_not_break_their_graphs(door):
    """As `parallelize_module` sets them."""
    torch._dynamo.reset()
    (expected,) = LocalWorld(1).run(lambda comm: hooked(comm, door, False))
    (found,) = LocalWorld(1).run(lambda comm: hooked(comm, door, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Signs(torch.optim.Optimizer):
    """Written by hand: a global norm, and state of its own."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param))
            mean.lerp_(param.grad, 0.1)
            param.add_(mean.sign(), alpha=-0.01).mul_(1 - 1e-3 * mean.norm())


def stepped(comm, door, make, compiled):
    """Parameters after three steps."""
    model = shard(seeded(partial(torch.nn.Linear, 8, 8)).double(), comm, door)
    optimizer = make(model.parameters())

    def step():
        optimizer.step()

    run = {"no": step, "step": optimizer.step, "function": step}[compiled]
    run = run if compiled == "no" else torch.compile(run, backend="eager")
    for number in range(3):
        model(torch.full((2, 8), number + 1.0).double()).square().mean().backward()
        run()
        optimizer.zero_grad()
    return params_of(model)


@pytest.mark.parametrize("compiled", ["step", "function"])
@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, foreach=True), Signs])
@pytest.mark.parametrize("door", DOORS)
def test_a_compiled_step_runs_as_it_is_written(door, make, compiled):
    torch._dynamo.reset()
    (expected,) = LocalWorld(1).run(lambda comm: stepped(comm, door, make, "no"))
    (found,) = LocalWorld(1).run(lambda comm: stepped(comm, door, make, compiled))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
