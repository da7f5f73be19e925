# SPDX-License-Identifier: Apache-2.0
"""Runs that ranks record, each a process."""

import os
import signal
import time

import torch
import torch.distributed.fsdp as torch_fsdp
from support.stack import Stack, shard_stack, step

from fullshard.report import recording
from fullshard.testing import LocalWorld


def train_fsdp2(folder):
    torch.manual_seed(0)
    model = Stack(2)
    for block in model.blocks:
        torch_fsdp.fully_shard(block)
    _train(torch_fsdp.fully_shard(model), folder)


def train_ours(folder):
    torch.manual_seed(0)
    _train(shard_stack(None, 2), folder)


def _train(model, folder):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(folder, model, optimizer):
        for _ in range(3):
            step(model, optimizer)
            optimizer.zero_grad()


def train_on_threads(folder, ranks, first, last, dies_at=None):
    """Train steps ``first`` to ``last``, with saves after every third; die outright in a step."""

    def train(comm):
        model = shard_stack(comm, 2, check_values=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording(folder, model, optimizer) as run:
            run.goes_on_from(first)
            for number in range(first, last):
                with run.span("data"):
                    time.sleep(0.01)
                if number == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                step(model, optimizer)
                optimizer.zero_grad()
                if number % 3 == 2:
                    with run.span("checkpoint"):
                        time.sleep(0.02)

    LocalWorld(ranks).run(train)
