# SPDX-License-Identifier: Apache-2.0
"""Programs in which ranks run different parts of a model.

The simulated device has one rank. What its host learns from others of parts that they run comes
from a rehearsal of the same program by threads.
"""

import threading
from functools import cache
from unittest import mock

import torch
from support.optional_parts import (
    PARTS,
    MixtureOfExperts,
    Residuals,
    as_recomputing,
    patterns,
    routes,
    sharded,
)
from support.recomputed_parts import WrappedInside, as_in_functions
from torch import nn

from device.network import is_question
from device.programs import program
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import using

STEPS = 5
# Drawn here: on the device tensors have no values.
ONCE, TWICE = ([patterns(4, seed, most) for seed in range(3 * STEPS)] for most in (1, 2))
ROUTES = [routes(4, seed) for seed in range(STEPS)]


def rehearsed(body, ranks):
    """Run ``body(comm)`` on threads; return what each rank has learned from others, in order."""
    learned, number = [[] for _ in range(ranks)], {}
    real = LocalComm.all_reduce

    def all_reduce(comm, tensors, op="sum", label=""):
        work = real(comm, tensors, op, label)
        if is_question(label):
            work.wait()
            learned[number[threading.get_ident()]].append((label, [t.clone() for t in tensors]))
        return work

    def one(comm):
        number[threading.get_ident()] = comm.rank
        body(comm)

    with mock.patch.object(LocalComm, "all_reduce", all_reduce):
        LocalWorld(ranks).run(one)
    return learned


def optional(name, play, *, shape=(4,), syncs=()):
    """Add a program whose step is ``play(model, rank, number, device)`` to a builder of models."""

    def add(build):
        def rehearse(comm):
            mesh = comm if len(shape) == 1 else _two_by_two(comm)
            model = build(mesh, "cpu")
            for param in model.parameters():
                nn.init.ones_(param)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(STEPS):
                play(model, comm.rank, step, "cpu")
                optimizer.step()
                optimizer.zero_grad()

        @program(
            name,
            shape=shape,
            steps=STEPS,
            syncs=syncs,
            answers=cache(lambda: rehearsed(rehearse, torch.Size(shape).numel())),
        )
        def _(job):
            model = build(job.mesh, "cuda")
            job.train(
                model, each_step=lambda number: play(model, job.rank, number, torch.device("cuda"))
            )

        return build

    return add


def _two_by_two(comm):
    """The replicas of a slice, and the ranks that share one, as a mesh of (2, 2) has them."""
    first, second = comm.rank // 2 * 2, comm.rank % 2
    return comm.subgroup(range(first, first + 2)), comm.subgroup(range(second, comm.size, 2))


def _loss(model, used, device):
    return model(torch.zeros(2, 3, device=device), used).sum()


def parts_once(model, rank, number, device):
    _loss(model, ONCE[number][rank], device).backward()


def parts_twice(model, rank, number, device):
    _loss(model, TWICE[number][rank], device).backward()


def parts_announced(model, rank, number, device):
    used = TWICE[number][rank]
    with using(model, **(dict.fromkeys(PARTS, 0) | used)):
        loss = _loss(model, used, device)
    loss.backward()


def forward_twice(model, rank, number, device):
    first, second = (_loss(model, TWICE[2 * number + n][rank], device) for n in range(2))
    for loss in ((first, second), (second, first), (first + second,))[number % 3]:
        loss.backward()


def to_experts(model, rank, number, device):
    _loss(model, ROUTES[number][rank], device).backward()


def parts(mesh, device, **options):
    with torch.device(device):
        return sharded(mesh, "fully_shard", drawn=False, check_values=False, **options)


@optional("optional parts", parts_once)
def _(mesh, device):
    return parts(mesh, device)


@optional("optional parts, again", parts_twice)
def _(mesh, device):
    return parts(mesh, device, again=True)


@optional("optional parts, announced", parts_announced)
def _(mesh, device):
    return parts(mesh, device)


@optional("optional parts, forward twice", forward_twice)
def _(mesh, device):
    return parts(mesh, device)


@optional("frozen blocks, and parts recomputed as a whole", parts_twice)
def _(mesh, device):
    with torch.device(device):
        return as_recomputing(mesh, frozen=True, drawn=False, check_values=False)


@optional("experts alone in recomputed blocks", to_experts)
def _(mesh, device):
    with torch.device(device):
        model = Residuals(saves=True, together=False, drawn=False)
        return model.shard(mesh, check_values=False)


@optional("experts in a unit around a checkpoint", to_experts)
def _(mesh, device):
    with torch.device(device):
        return WrappedInside(True, together=False, drawn=False).shard(mesh, check_values=False)


@optional("optional parts in functions", parts_twice)
def _(mesh, device):
    with torch.device(device):
        return as_in_functions(mesh, "by part", drawn=False, check_values=False)


@optional("optional parts before functions", parts_twice)
def _(mesh, device):
    with torch.device(device):
        return as_in_functions(mesh, "blocks", drawn=False, check_values=False)


def experts(mesh, device, **kinds):
    with torch.device(device):
        return MixtureOfExperts(drawn=False, **kinds).shard(mesh, check_values=False)


@optional("shared experts in recomputed blocks", to_experts)
def _(mesh, device):
    return experts(mesh, device, again=True, shared=True)
