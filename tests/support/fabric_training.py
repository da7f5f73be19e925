# SPDX-License-Identifier: Apache-2.0
"""Training through Lightning Fabric, as one of its scripts would, on two CPU ranks.

The one thing that is not Fabric's own is the device: it takes its FSDP strategy for GPUs only,
which a class of another name avoids, and hands FSDP the device's index, which a CPU has not.
"""

from unittest.mock import patch

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import FSDPStrategy
from support.library_cases import BATCH, SAVED_AT, STEPS, Answer
from support.library_models import (
    block_classes,
    engine_of,
    loss_of,
    make,
    samples,
    weights_by_summon,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


class FSDPStrategyOnCpu(FSDPStrategy):
    def setup_module(self, module):
        with patch.object(FullyShardedDataParallel, "__init__", _init_on_cpu):
            return super().setup_module(module)


_init = FullyShardedDataParallel.__init__


def _init_on_cpu(self, *args, device_id=None, **kwargs):
    _init(self, *args, device_id=torch.device("cpu"), **kwargs)


def run(case, folder):
    """Losses of training, and of training on from what `Fabric.save` saved in mid-way."""
    fabric = _fabric(case)
    parts = _prepared(fabric, case, seed=0)
    engine = engine_of(parts[0]._forward_module)
    losses, norms = train(fabric, case, parts, range(SAVED_AT))
    state = {"model": parts[0], "optimizer": parts[1], "steps": SAVED_AT}
    saves = engine == "fullshard" or case.torch_can_save
    if saves:
        fabric.save(folder, state)
    more_losses, more_norms = train(fabric, case, parts, range(SAVED_AT, STEPS))
    weights = weights_by_summon(parts[0]._forward_module)
    resumed = resume(case, folder) if saves else []
    return Answer(engine, losses + more_losses, norms + more_norms, resumed, weights)


def resume(case, folder):
    """Losses of training on from what `run` has saved, here or over the other FSDP."""
    fabric = _fabric(case)
    parts = _prepared(fabric, case, seed=9)
    state = {"model": parts[0], "optimizer": parts[1], "steps": 0}
    assert fabric.load(folder, state) == {}
    return train(fabric, case, parts, range(state["steps"], STEPS))[0]


def _fabric(case):
    options = dict(case.options)
    blocks = block_classes(case.model)
    if options.pop("recomputed", False):
        options["activation_checkpointing_policy"] = blocks
    strategy = FSDPStrategyOnCpu(auto_wrap_policy=blocks, **options)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=case.precision)
    fabric.launch()
    return fabric


def _prepared(fabric, case, seed):
    model = make(case.model, seed)
    data = DataLoader(samples(case.model, 2 * BATCH * STEPS * case.accumulation), BATCH)
    if case.model_first:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, optimizer, fabric.setup_dataloaders(data)


def train(fabric, case, parts, steps):
    model, optimizer, data = parts
    losses, norms = [], []
    for number, batch in enumerate(data):
        if number // case.accumulation not in steps:
            continue
        last = (number + 1) % case.accumulation == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = loss_of(case.model, model, batch)
            fabric.backward(loss)
        if last:
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    assert len(norms) == len(steps)
    return losses, norms
