# SPDX-License-Identifier: Apache-2.0
"""What ranks that are processes run; importable by name there."""

import torch
import torch.distributed as dist
from gpu.training import build, shard, train

from fullshard.torch import CPUOffloadPolicy, MixedPrecisionPolicy, summon_full_params
from fullshard.torch.comm.process_group import ProcessGroupComm

OPTIONS = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "fp64 policy": {"mp_policy": MixedPrecisionPolicy(torch.float64, torch.float64)},
}


def train_over(group, device, option):
    """Losses and parameters of a model on ``device``, sharded over ``group``."""
    model = shard(build(device), group, **OPTIONS[option])
    losses = train(model, dist.get_rank(group), dist.get_world_size(group), torch.device(device))
    # Not by DTensor.full_tensor(), which in torch 2.11 ends the process over Gloo on CUDA.
    with summon_full_params(model, writeback=False):
        whole = {name: param.detach().cpu() for name, param in model.named_parameters()}
    return losses.tolist(), whole


def every_collective(group, device):
    """Results of each method of a `ProcessGroupComm` on small tensors of ``device``."""
    comm, rank = ProcessGroupComm(group), dist.get_rank(group)
    size = comm.size
    mine = torch.arange(4.0, device=device) + 10 * rank
    gathered, in_place = (torch.full((4 * size,), float("nan"), device=device) for _ in range(2))
    in_place[4 * rank : 4 * rank + 4] = mine
    work = comm.all_gather([(gathered, mine), (in_place, in_place[4 * rank : 4 * rank + 4])])
    work.wait()
    low = torch.arange(4.0 * size, device=device).bfloat16()
    reduced = torch.full((4,), float("nan"), dtype=torch.bfloat16, device=device)
    comm.reduce_scatter([(reduced, low)]).wait()
    total, most, first = mine.clone(), mine.clone(), mine.clone()
    comm.all_reduce([total]).wait()
    comm.all_reduce([most], "max").wait()
    comm.broadcast([first], 0).wait()
    tensors = (gathered, in_place, reduced, total, most, first)
    assert all(tensor.device == torch.device(device) for tensor in tensors)
    return [tensor.tolist() for tensor in tensors]
