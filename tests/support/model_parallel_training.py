# SPDX-License-Identifier: Apache-2.0
"""Training through Lightning Fabric's `ModelParallelStrategy`, which is FSDP2, on two CPU ranks."""

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from support.fabric_training import train
from support.library_cases import BATCH, SAVED_AT, STEPS, Answer
from support.library_models import as_arrays, block_classes, engine_of, make, samples
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


def run(case, folder):
    """Losses of training, and of training on from what `Fabric.save` saved in mid-way."""
    fabric = _fabric(case)
    parts = _prepared(fabric, case, seed=0)
    losses, norms = train(fabric, case, parts, range(SAVED_AT))
    state = {"model": parts[0], "optimizer": parts[1], "steps": SAVED_AT}
    fabric.save(folder, state)
    more_losses, more_norms = train(fabric, case, parts, range(SAVED_AT, STEPS))
    model = parts[0]._forward_module
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = as_arrays(get_model_state_dict(model, options=options))
    resumed = resume(case, folder)
    return Answer(engine_of(model), losses + more_losses, norms + more_norms, resumed, weights)


def resume(case, folder):
    """Losses of training on from what `run` has saved, here or over the other FSDP."""
    fabric = _fabric(case)
    parts = _prepared(fabric, case, seed=9)
    state = {"model": parts[0], "optimizer": parts[1], "steps": 0}
    assert fabric.load(folder, state) == {}
    return train(fabric, case, parts, range(state["steps"], STEPS))[0]


def _fabric(case):
    def parallelize(model, mesh):
        data = mesh["data_parallel"]
        for module in list(model.modules()):
            if isinstance(module, tuple(block_classes(case.model))):
                fully_shard(module, mesh=data)
        return fully_shard(model, mesh=data, reshard_after_forward=False)

    strategy = ModelParallelStrategy(
        parallelize,
        data_parallel_size=2,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not case.whole,
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=case.precision)
    fabric.launch()
    return fabric


def _prepared(fabric, case, seed):
    with fabric.init_module(empty_init=case.from_meta and seed != 0):
        model = make(case.model, seed)
    model = fabric.setup_module(model)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = DataLoader(samples(case.model, 2 * BATCH * STEPS * case.accumulation), BATCH)
    return model, optimizer, fabric.setup_dataloaders(data)
