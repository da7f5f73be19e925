# SPDX-License-Identifier: Apache-2.0
"""The local world of the engine's own tests, which run it on a CPU, on tensors of a GPU."""

import pytest
import torch
from gpu.training import assert_same, build, full_parameters, plain, shard, train
from support.threads import on_ranks

from fullshard.testing import LocalWorld
from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy

OPTIONS = {
    "plain": {},
    "reshard 2": {"reshard_after_forward": 2},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "fp64": {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)},
}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_training_equals_one_process(option, eager, gpu):
    size = 4 if option == "reshard 2" else 2
    expected = plain(size, gpu)

    def body(comm):
        model = shard(build(gpu), comm, **OPTIONS[option])
        train(model, comm.rank, comm.size, gpu)
        return full_parameters(model)

    for found in LocalWorld(size, eager=eager).run(body):
        assert_same(found, expected)


@on_ranks(2)
def test_outputs_hold_nan_until_they_are_waited_for(comm, gpu):
    full = torch.zeros(8, device=gpu)
    work = comm.all_gather([(full, torch.full((4,), float(comm.rank), device=gpu))])
    before = full.isnan().all().item()
    work.wait()
    assert (before, full.tolist()) == (True, [0.0] * 4 + [1.0] * 4)


@on_ranks(2)
def test_a_result_is_behind_the_stream_it_was_issued_on(comm, gpu):
    """As with NCCL: issued on one stream, awaited on another."""
    mine, full = torch.zeros(4, device=gpu), torch.zeros(8, device=gpu)
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        mine.fill_(comm.rank + 1.0)
        work = comm.all_gather([(full, mine)])
    work.wait()
    assert full.tolist() == [1.0] * 4 + [2.0] * 4
