# SPDX-License-Identifier: Apache-2.0
"""Programs about the ranks themselves: groups of every kind, one rank alone, and their inputs."""

import os
import warnings
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from device.around import run_through
from device.by_hand import layers
from device.programs import Stack, gpt, program, shard, wrapped
from device.values import refused
from device.world import real
from fullshard import torch as ours
from fullshard.torch.comm import ranks
from fullshard.torch.comm.protocol import SoloComm

HYBRID = ours.ShardingStrategy.HYBRID_SHARD
CODED = ours.CommunicationCompression(gather="bf16", reduce="int8", error_feedback=True)


def expect(job, **sizes):
    """The sizes of the groups in which collectives of each kind have run."""
    for kind, expected in sizes.items():
        names = {group for group, each, *_ in job.machine.collectives if each == kind}
        groups = {dist.distributed_c10d._resolve_process_group(name).size() for name in names}
        if groups != set(expected):
            job.machine.find(f"{kind} in groups of {sorted(groups)} ranks")


@program("one rank alone", shape=(4, 1))
def _(job):
    for mesh in (job.mesh["shard"], SoloComm()):
        job.train(shard(gpt(), mesh, reshard_after_forward=1, compression=CODED))
    expect(job, all_gather=(), reduce_scatter=(), all_to_all=())


@program("a pair of groups", shape=(3, 2))
def _(job):
    pair = job.mesh.get_group("shard"), job.mesh.get_group("replicate")
    model = ours.FullyShardedDataParallel(gpt("cpu"), pair, HYBRID, device_id=0)
    job.train(model, before_step=lambda _: model.clip_grad_norm_(1.0))
    expect(job, all_gather=(2,), reduce_scatter=(2,), all_reduce=(2, 3))


@program("hybrid by hosts", shape=(6,))
def _(job):
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        with real():
            ranks.ranks_of(None, HYBRID.sharding)
        model = ours.FullyShardedDataParallel(
            gpt("cpu"), sharding_strategy=HYBRID, device_id=torch.device("cuda")
        )
    job.train(model)
    expect(job, all_gather=(2,), reduce_scatter=(2,))


@program("one dim of a mesh of two", shape=(3, 2))
def _(job):
    with warnings.catch_warnings(action="ignore"):
        model = wrapped(gpt("cpu"), job.mesh, device_id=0)
    job.train(model)
    expect(job, all_gather=(3,), reduce_scatter=(3,))


@program("the group of all ranks")
def _(job):
    model = gpt()
    for module in (*model.blocks, model):
        ours.fully_shard(module, check_values=False)
    job.train(model)
    expect(job, all_gather=(4,), reduce_scatter=(4,))
    if len({group for group, *_ in job.machine.collectives}) < 2:
        job.machine.find("gathers have no communicator of their own")


@program("compressed gathers of what is bf16, reduces without feedback")
def _(job):
    coded = ours.CommunicationCompression(gather="bf16", reduce="int8", block_numel=64)
    dtype = torch.bfloat16
    model = Stack([nn.Linear(64, 64, device="cuda", dtype=dtype) for _ in range(3)])
    shard(model, job.mesh, compression=coded)

    def loss(model):
        return model(torch.zeros(2, 64, device="cuda", dtype=dtype)).sum()

    def look(_):
        str(ours.memory_summary(model)), str(ours.communication(model))

    job.train(model, before_step=look, loss=loss)


@program("every call compared", syncs=("agreement.py",))
def _(job):
    fresh = mock.patch.object(ranks, "_communicators", WeakKeyDictionary())
    with fresh, mock.patch.dict(os.environ, FULLSHARD_DEBUG="1"):
        model = shard(layers(Stack, 3, 64), job.mesh, reshard_after_forward=2)
        job.train(model, each_step=lambda _: run_through(model, 64))
    compared = False
    for _, kind, label, *_ in job.machine.collectives:
        if not (compared or label.startswith("comparison")):
            job.machine.find(f"{kind} ({label}) is not compared")
        compared = label.startswith("comparison")


@program("groups that are refused", shape=(2, 2))
def _(job):
    coded, one = ours.CommunicationCompression, job.mesh["shard"]
    with real():
        cube = init_device_mesh("cuda", (1, 2, 2))

    def whole(**options):
        model = gpt("cpu")
        return lambda: ours.FullyShardedDataParallel(model, **options)

    def part(mesh, **options):
        model = gpt()
        return lambda: ours.fully_shard(model, mesh=mesh, **options)

    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"):
        refused(job, whole(sharding_strategy=HYBRID))
    refused(
        job,
        part(cube),
        part("all"),
        part(one, reshard_after_forward=3),
        whole(device_mesh=one, sharding_strategy=HYBRID),
        part(one, compression="int8"),
        whole(
            device_mesh=one,
            sharding_strategy=ours.ShardingStrategy.NO_SHARD,
            compression=CODED,
        ),
        *(lambda: coded(), lambda: coded(gather="int4"), lambda: coded(reduce="fp8")),
        *(lambda: coded(gather="int8", block_numel=33),),
        lambda: coded(gather="int8", error_feedback=True),
    )


@program("batches of unequal number")
def _(job):
    """The others have one less: they get a batch again, and have none from the beginning."""
    model = shard(gpt(), job.mesh)
    batches = [job.inputs() for _ in range(3)]

    def each_step(_):
        with real():  # that ranks ask each other on the host
            turns = list(ours.pad_to_longest(batches, size_of=len))
            fewest = list(ours.stop_together(batches))
            ours.any_rank(False)
        if (len(turns), len(fewest)) != (3, 0):
            job.machine.find(f"{len(turns)} and {len(fewest)} batches")
        for batch, weight in turns:
            (model(batch).sum() * weight).backward()

    job.train(model, each_step=each_step)
