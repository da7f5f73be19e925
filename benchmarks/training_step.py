# SPDX-License-Identifier: Apache-2.0
"""One small transformer, what a step of it is, and engines that take steps in turn."""

import statistics
import time
from random import Random

import torch
import torch.distributed as dist
from default_configuration import adamw
from torch import nn

from fullshard.torch import overlap_optimizer

WIDTH, BLOCKS, TOKENS = 768, 6, 64
BLOCK = nn.TransformerEncoderLayer
BESIDE_FORWARD = ", beside forward"
WARM_UP_ROUNDS = 2  # the first records the order of units, the second is the first to follow it


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        *(BLOCK(WIDTH, 12, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS))
    )


def part_of(params, ranks):
    """As many of ``params`` as one of ``ranks`` sharded ranks would update."""
    params = list(params)
    wanted = sum(p.numel() for p in params) / ranks
    chosen, numel = [], 0
    for param in params:
        if numel < wanted:
            chosen.append(param)
            numel += param.numel()
    return chosen


def step(model, optimizer, inputs):
    loss = model(inputs).float().square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()
    return loss.item()


def take_turns(engines, alone, rounds, sent_bytes=lambda: 0, optimizer=adamw):
    """For each engine: seconds, bytes sent by this rank and loss of each round's step.

    Ranks begin and end each step together. Each round has an order of its own, the same on all
    ranks: nobody always comes after an engine that leaves memory or connections in a bad state.
    Engines whose name ends with `BESIDE_FORWARD` put off their optimizer's steps. The engine named
    ``alone`` communicates nothing: it updates as many parameters as a rank with a
    shard does, so that no engine can be faster.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    running = {}
    for name, make in engines.items():
        model = make()
        params = part_of(model.parameters(), world) if name == alone else model.parameters()
        running[name] = model, optimizer(params)
        if name.endswith(BESIDE_FORWARD):
            overlap_optimizer(*running[name], beside="forward")
    found = {name: {"seconds": [], "sent_bytes": [], "losses": []} for name in running}
    turns = list(running.items())
    for number in range(WARM_UP_ROUNDS + rounds):
        Random(number).shuffle(turns)
        for name, (model, optimizer) in turns:
            dist.barrier()
            sent, start = sent_bytes(), time.perf_counter()
            loss = step(model, optimizer, inputs)
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - start)
            found[name]["sent_bytes"].append(sent_bytes() - sent)
            found[name]["losses"].append(loss)
    warm = slice(WARM_UP_ROUNDS, None)
    return {n: {key: each[warm] for key, each in row.items()} for n, row in found.items()}


def throughput_ratio(seconds, peer_seconds):
    """The median over rounds of the peer's time over this one's: above 1 is faster."""
    return statistics.median(p / s for p, s in zip(peer_seconds, seconds, strict=True))
