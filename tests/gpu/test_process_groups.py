# SPDX-License-Identifier: Apache-2.0
"""Process groups on one GPU: several ranks over Gloo, one over NCCL."""

import pytest
import torch
import torch.distributed as dist
from gpu.rank_training import OPTIONS, every_collective, train_over
from gpu.stream_world import LateCopies, poison_buffers, sleep_on
from gpu.training import assert_same, build, full_parameters, plain, shard, train
from support.models import GPT, loss_of, make_batches

from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.torch.step.managed import managed_unit_of


def named(device):
    return "cuda:0" if device.type == "cuda" else "cpu"


def test_collectives_of_gloo(gloo_world, device):
    for size in (2, 3):
        for rank, found in enumerate(gloo_world.run(size, every_collective, named(device))):
            everything = [number + 10.0 * other for other in range(size) for number in range(4)]
            start = 4 * rank
            assert found == [
                everything,
                everything,
                [size * (start + number) for number in range(4)],
                [size * number + 10.0 * sum(range(size)) for number in range(4)],
                [number + 10.0 * (size - 1) for number in range(4)],
                [0.0, 1.0, 2.0, 3.0],
            ]


@pytest.mark.parametrize("option", OPTIONS)
def test_training_over_gloo(option, gloo_world, device):
    expected = plain(2, device)
    for _, found in gloo_world.run(2, train_over, named(device), option):
        assert_same(found, expected)


# What makes one rank gather and free like many: full parameters are not its shard.
WAYS = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload bf16": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_gathers(way, one_rank, device, monkeypatch):
    """Poisoned buffers and late copies change nothing, and full parameters come and go."""
    dtype = torch.float64 if way == "offload" else torch.float32
    model = shard(build(device, dtype), one_rank, **WAYS[way])
    assert not managed_unit_of(model.blocks[0]).unit.resident
    expected = train(model, 0, 1, device)
    poison_buffers(monkeypatch)
    LateCopies(monkeypatch, device)
    again = shard(build(device, dtype), one_rank, **WAYS[way])
    found = train(again, 0, 1, device)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    if way == "offload":
        assert_same(full_parameters(again), plain(1, device))


def test_a_gather_sees_what_the_stream_has_yet_to_write(one_rank, device):
    """An optimizer's late writes, casts behind them, and the collective behind those."""
    tokens = make_batches("gpt", 1, 2)[0][0].to(device)

    def output(wait_for_writes):
        model = shard(build(device, torch.float32), one_rank, **WAYS["bf16"])
        with torch.no_grad():
            model(tokens)
            sleep_on(device)
            for param in model.parameters():
                param.mul_(0.5)
            if wait_for_writes and device.type == "cuda":
                torch.cuda.synchronize()
            return model(tokens)

    torch.testing.assert_close(output(False), output(True), rtol=0, atol=0)


def test_a_model_on_the_host_moves_to_where_nccl_is(one_rank, device):
    model = shard(build("cpu", torch.float32), one_rank)
    assert {param.device.type for param in model.parameters()} == {device.type}
    tokens, targets = make_batches("gpt", 1, 2)[0]
    loss_of(model(tokens.to(device)), targets.to(device)).backward()


def test_a_model_from_the_meta_device(one_rank, device):
    with torch.device("meta"):
        model = shard(GPT(width=12, blocks=3), one_rank, **WAYS["bf16"])
    model.to_empty(device=device)
    model.load_state_dict(build(device, torch.float32).state_dict())
    expected = train(shard(build(device, torch.float32), one_rank, **WAYS["bf16"]), 0, 1, device)
    torch.testing.assert_close(train(model, 0, 1, device), expected, rtol=0, atol=0)


def test_offloaded_values_can_be_asked_for(one_rank, device):
    """NCCL has no way for what rests on the host; it goes over the GPU."""
    model = shard(build(device), one_rank, offload_policy=CPUOffloadPolicy())
    for name, value in build(device).named_parameters():
        param = model.get_parameter(name)
        assert param.device.type == "cpu"
        torch.testing.assert_close(param.full_tensor(), value.detach().cpu(), rtol=0, atol=0)


def test_a_mesh_of_the_gpu_is_where_it_computes(gpu, tmp_path):
    """Also if the mesh has made the process group itself, whose backend then has no name."""
    if dist.is_initialized():
        pytest.skip("another test has left a process group behind")
    dist.init_process_group(init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        layer = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
        assert layer.weight.device == gpu
    finally:
        dist.destroy_process_group()
