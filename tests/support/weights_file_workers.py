# SPDX-License-Identifier: Apache-2.0
"""Models that are saved unit by unit and loaded in pieces, and the memory that this takes."""

import re
import time
from pathlib import Path

import torch
from support import tensor_parallel_workers
from torch import nn

from fullshard.core.errors import ConfigurationError
from fullshard.torch import fully_shard, load_full_weights, save_full_weights

LAYERS, WIDTH = 16, 2048
ROWS = 4096  # of the largest parameter
SAVING_BYTES = 68 * 10**6  # a quarter of the whole, for two units
LOADING_BYTES = 28 * 10**6  # less than the largest parameter
MODULUS = 65_521


def build(group):
    """A model of which no rank has ever had more than its shard."""
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        model = nn.Sequential(nn.Embedding(ROWS, WIDTH), *layers)
        model.register_buffer("scale", torch.ones(5))
    for layer in model:
        fully_shard(layer, mesh=group)
    fully_shard(model, mesh=group)
    model.to_empty(device="cpu")
    model.scale.fill_(3.0)
    for name, param in model.named_parameters():
        param.local.copy_(expected(name, param.span.start, param.span.stop))
    return model


def expected(name, start, stop):
    """The elements [start, stop) of a parameter."""
    number = sum(name.encode())
    return ((torch.arange(start, stop) + number) % MODULUS).float()


def extra_bytes_of(action):
    """How far the process's memory rises above where it is before ``action``; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    begin = time.monotonic()
    action()
    return _status("VmHWM") - before, time.monotonic() - begin


def _status(field):
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def stream(group, path):
    """Bytes of extra memory for saving, loading and for the largest parameter gathered whole."""
    model = build(group)
    saving, _ = extra_bytes_of(lambda: save_full_weights(model, path))
    for param in model.parameters():
        param.local.zero_()
    loading, _ = extra_bytes_of(lambda: load_full_weights(model, path))
    right = all(
        torch.equal(param.local, expected(name, param.span.start, param.span.stop))
        for name, param in model.named_parameters()
    )
    gathering, _ = extra_bytes_of(lambda: model[0].weight.full_tensor())
    return saving, loading, gathering, right


def load_from_own_paths(group, paths):
    """The error, and whether the weights are as before, where ranks name different files."""
    model = fully_shard(nn.Linear(40, 3), mesh=group)
    before = [param.local.clone() for param in model.parameters()]
    try:
        load_full_weights(model, paths[group.rank()])
    except ConfigurationError as error:
        text = str(error)
    return text, all(map(torch.equal, before, [param.local for param in model.parameters()]))


def through_a_file_on_two_axes(_group, path):
    """Whether parameters that are cut along a tensor axis too come back, and the file's names."""
    model, _ = tensor_parallel_workers.build("column and row", "function")
    before = {name: each.detach().full_tensor() for name, each in model.named_parameters()}
    save_full_weights(model, path)
    tensor_parallel_workers.clear(model)
    load_full_weights(model, path)
    after = {name: each.detach().full_tensor() for name, each in model.named_parameters()}
    return all(torch.equal(before[name], after[name]) for name in before), before
