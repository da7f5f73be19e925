# SPDX-License-Identifier: Apache-2.0
"""Every optimizer on every world, in every layout and mode, after five steps as in one process.

In float64, with gradients added in the order of ranks. Experts on an axis of their own:
``test_stacks.py``. Other libraries: ``test_other_libraries.py``, ``test_low_bit_states.py``.
"""

from functools import partial
from itertools import product

import pytest
import torch
from support.beside import grid
from support.expert_workers import StackedMuon
from support.optimizers import OPTIMIZERS
from support.owned_matrices import (
    alone,
    assert_equal_in_float64,
    full,
    in_float64,
    is_for_muon,
    sharded,
    train,
    wrapped,
)
from support.sampling import few

import fullshard.torch as fs
from fullshard.testing import LocalWorld

OF_MATRICES = {
    "muon": partial(torch.optim.Muon, lr=0.02, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "stacked muon": StackedMuon,
}
# The door, the layout, and whether an optimizer over matrices exchanges them.
WAYS = {
    f"{door} {align}": (make, align)
    for (door, make), align in product(
        {"fully_shard": sharded, "wrapper": wrapped}.items(), ("row", "element", "matrix")
    )
}
WORLDS = (1, 2, 3, 4, 5, 8)
MODES = {  # the micro-batches of a step, and options
    "full": (1, {}),
    "accumulated": (2, {}),
    "offload": (1, {"offload": True}),
    "hybrid": (1, {"hybrid": True}),
    "hybrid, accumulated, offload": (3, {"hybrid": True, "offload": True}),
}

CASES = few([*product([*OF_MATRICES, *OPTIMIZERS], WAYS, WORLDS, MODES)])


def optimizers_of(name, model):
    """Return the optimizer of ``name`` over matrices or all, and AdamW for what it leaves."""
    params = list(model.named_parameters())
    if name not in OF_MATRICES:
        return [OPTIMIZERS[name]([param for _, param in params])]
    matrices = [is_for_muon(each.replace("_fsdp_wrapped_module.", "")) for each, _ in params]
    mine = [param for (_, param), chosen in zip(params, matrices, strict=True) if chosen]
    rest = [param for (_, param), chosen in zip(params, matrices, strict=True) if not chosen]
    return [OF_MATRICES[name](mine), torch.optim.AdamW(rest, lr=1e-3)]


def prepared(comm, way, row, options):
    make, align = WAYS[way]
    chosen = {}
    if options.get("offload"):
        chosen = {"offload_policy": fs.CPUOffloadPolicy(pin_memory=False)}
    if make is wrapped:
        strategy = "HYBRID_SHARD" if options.get("hybrid") else "FULL_SHARD"
        chosen = {
            "sharding_strategy": fs.ShardingStrategy[strategy],
            "cpu_offload": fs.CPUOffload(bool(chosen)),
        }
    return make(grid(comm, row) if options.get("hybrid") else comm, align=align, **chosen)


@pytest.mark.parametrize(("name", "way", "world", "mode"), CASES)
def test_it_is_that_of_one_process(name, way, world, mode, monkeypatch):
    in_float64(monkeypatch)
    parts, options = MODES[mode]
    row = (2 if world in (4, 8) else 1) if options.get("hybrid") else world

    def body(comm):
        model = prepared(comm, way, row, options)
        optimizers = optimizers_of(name, model)
        if name in OF_MATRICES and "matrix" not in way:
            fs.exchange_matrices(optimizers[0])
        train(model, optimizers, comm.rank, parts)
        return full(model)

    expected = alone(world, parts, lambda model: optimizers_of(name, model), row=row)
    for values in LocalWorld(world).run(body):
        assert_equal_in_float64(values, expected)
