# SPDX-License-Identifier: Apache-2.0
"""Blocks compiled before and after they are sharded train like blocks that are not compiled."""

import pytest
import torch
from gpu.stream_world import StreamWorld
from gpu.training import build, shard, train

from fullshard.torch import MixedPrecisionPolicy
from fullshard.torch.comm.protocol import SoloComm


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def backend(device):
    if device.type == "cpu":
        return "aot_eager"  # no compiler of machine code is asked for
    pytest.importorskip("triton", reason="torch.compile needs Triton on a GPU")
    return "inductor"


def compile_inside(block, backend):
    for part in (block.attention, block.mlp):
        part.compile(backend=backend)


def compile_whole(block, backend):
    block.compile(backend=backend)


def never(block, backend):
    pass


@pytest.mark.filterwarnings("default")  # the compiler's own, which are not ours to mend
@pytest.mark.parametrize("how", [compile_inside, compile_whole], ids=lambda how: how.__name__)
def test_compiled_blocks(how, backend, device):
    """A policy other than the parameters' dtype makes one rank gather and free."""

    def losses(before, after):
        model = build(device, torch.float32)
        for block in model.blocks:
            before(block, backend)
        policy = MixedPrecisionPolicy(torch.float64, output_dtype=torch.float64)
        model = shard(model, SoloComm(), mp_policy=policy)
        for block in model.blocks:
            after(block, backend)
        return train(model, 0, 1, device).cpu()

    expected = losses(never, never)
    torch.testing.assert_close(losses(how, never), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(losses(never, how), expected, rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("default")
def test_compiled_and_not_are_equal_on_ranks(device):
    """The frames are compiled by one thread, then run by all."""
    backend = "eager"  # AOT traces one model by what it puts into all modules of all threads

    def run(compiled):
        def body(comm):
            model = build(device)
            if compiled:
                for block in model.blocks:
                    compile_inside(block, backend)
            model = shard(model, comm)
            losses = train(model, comm.rank, comm.size, device)
            return losses.cpu()

        return StreamWorld(2, device).run(body)

    for found, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", [compile_inside, compile_whole], ids=lambda how: how.__name__)
def test_lengths_that_change(how, backend, device):
    """Compiled for any length, and run in bf16 over parameters that come and go."""

    def losses(compiled):
        model = build(device, torch.float32)
        if compiled:
            for block in model.blocks:
                how(block, backend)
        policy = MixedPrecisionPolicy(torch.float64, output_dtype=torch.float64)
        model = shard(model, SoloComm(), mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for length in (6, 9, 4, 12, 7):
            tokens = torch.arange(2 * length, device=device).view(2, length) % 17
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found).cpu()

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-4, atol=0)


def as_graphs(block, backend):
    """Pieces of the block as CUDA graphs, which read parameters where they were captured."""
    for part in (block.attention, block.mlp):
        part.compile(mode="reduce-overhead")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kept", [False, True])
def test_blocks_as_cuda_graphs(kept, gpu):
    """``reduce-overhead`` is right though a unit's memory moves from step to step."""
    pytest.importorskip("triton", reason="torch.compile needs Triton on a GPU")

    def losses(compiled):
        model = build(gpu, torch.float32, width=96)
        policy = MixedPrecisionPolicy(torch.bfloat16)
        model = shard(model, SoloComm(), mp_policy=policy, reshard_after_forward=not kept)
        for block in model.blocks if compiled else ():
            as_graphs(block, None)
        return train(model, 0, 1, gpu).cpu()

    torch.testing.assert_close(losses(True), losses(False), rtol=3e-2, atol=0)
