# SPDX-License-Identifier: Apache-2.0
"""One of each collective, on any communicator."""

import torch


def collectives(comm):
    """One of each, with values that tell the ranks apart."""
    full, shard = torch.empty(2 * comm.size), torch.tensor([1.0, 2.0]) + 10 * comm.rank
    comm.all_gather([(full, shard)]).wait()
    part = torch.empty(2)
    comm.duplicate().reduce_scatter([(part, full)]).wait()
    extremes = [torch.tensor(float(comm.rank)), torch.tensor(-float(comm.rank))]
    comm.all_reduce(extremes, "max").wait()
    sent = torch.tensor([comm.rank])
    comm.broadcast([sent], source=comm.size - 1).wait()
    return full.tolist(), part.tolist(), [e.item() for e in extremes], sent.item()
