# SPDX-License-Identifier: Apache-2.0
"""Training of models that transformers itself shards while it loads them, on two CPU ranks."""

import os

import torch
import torch.distributed as dist
from support.library_cases import BATCH, SAVED_AT, STEPS, Answer
from support.library_models import as_arrays, engine_of, loss_of, make, samples
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM
from transformers.distributed import (
    DistributedConfig,
    gather_full_state_dict,
    load_optimizer_distributed,
    save_optimizer_distributed,
)


def run(case, folder):
    """Losses of training, and of training on from what `save_pretrained` saved in mid-way."""
    plain = os.path.join(folder, "plain")
    if dist.get_rank() == 0:
        make(case.model).save_pretrained(plain)
    dist.barrier()
    model, optimizer = _loaded(case, plain)
    losses, norms = _train(case, model, optimizer, range(SAVED_AT))
    weights, states = os.path.join(folder, "weights"), os.path.join(folder, "states")
    model.save_pretrained(weights, distributed_checkpoint=case.distributed)
    save_optimizer_distributed(model, optimizer, states)
    more_losses, more_norms = _train(case, model, optimizer, range(SAVED_AT, STEPS))
    arrays = as_arrays(gather_full_state_dict(model))
    resumed = resume(case, folder)
    return Answer(engine_of(model), losses + more_losses, norms + more_norms, resumed, arrays)


def resume(case, folder):
    """Losses of training on from what `run` has saved, here or over the other FSDP."""
    model, optimizer = _loaded(case, os.path.join(folder, "weights"))
    load_optimizer_distributed(model, optimizer, os.path.join(folder, "states"))
    return _train(case, model, optimizer, range(SAVED_AT, STEPS))[0]


def _loaded(case, folder):
    config = DistributedConfig(fsdp_size=2)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, dtype=torch.float32
    )
    assert all(isinstance(each, DTensor) for each in model.parameters())
    return model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(case, model, optimizer, steps):
    data = samples(case.model, 2 * BATCH * STEPS)
    mine = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
    losses, norms = [], []
    for number, batch in enumerate(DataLoader(data, BATCH, sampler=mine)):
        if number not in steps:
            continue
        loss = loss_of(case.model, model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / 2)
    return losses, norms
