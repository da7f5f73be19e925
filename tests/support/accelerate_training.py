# SPDX-License-Identifier: Apache-2.0
"""Training through Hugging Face Accelerate, as one of its scripts would, on two CPU ranks.

The one thing patched is where Accelerate looks for GPUs: it takes its FSDP plugin only then.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from support.library_cases import BATCH, SAVED_AT, STEPS, Answer
from support.library_models import (
    as_arrays,
    block_classes,
    engine_of,
    loss_of,
    make,
    samples,
    weights_by_summon,
)
from torch.utils.data import DataLoader


def run(case, folder):
    """Losses of training, and of training on from what `save_state` saved in mid-way."""
    accelerator = _accelerator(case)
    parts = _prepared(accelerator, case, seed=0)
    engine = engine_of(parts[0])
    losses, norms = _train(accelerator, case, parts, range(SAVED_AT))
    ours = engine == "fullshard"
    saves = ours or case.torch_can_save
    if saves:
        accelerator.save_state(folder)
    more_losses, more_norms = _train(accelerator, case, parts, range(SAVED_AT, STEPS))
    if ours or case.version == 2:
        weights = as_arrays(accelerator.get_state_dict(parts[0]))
    else:  # for the same reason
        weights = weights_by_summon(parts[0])
    resumed = resume(case, folder) if saves else []
    return Answer(engine, losses + more_losses, norms + more_norms, resumed, weights)


def resume(case, folder):
    """Losses of training on from what `run` has saved, here or over the other FSDP."""
    accelerator = _accelerator(case)
    parts = _prepared(accelerator, case, seed=9)
    accelerator.load_state(folder)
    return _train(accelerator, case, parts, range(SAVED_AT, STEPS))[0]


def _accelerator(case):
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=case.version,
        **{
            "auto_wrap_policy": "transformer_based_wrap",
            "transformer_cls_names_to_wrap": [each.__name__ for each in block_classes(case.model)],
            "use_orig_params": True if case.version == 1 else None,
            **case.options,
        },
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
    )
    assert accelerator.distributed_type is DistributedType.FSDP
    return accelerator


def _prepared(accelerator, case, seed):
    model = make(case.model, seed).to(getattr(torch, case.loaded_as))
    data = DataLoader(samples(case.model, 2 * BATCH * STEPS * case.accumulation), BATCH)
    if case.model_first:
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer, data = accelerator.prepare(optimizer, data)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
    return model, optimizer, data


def _train(accelerator, case, parts, steps):
    model, optimizer, data = parts
    losses, norms = [], []
    for number, batch in enumerate(data):
        if number // case.accumulation not in steps:
            continue
        with accelerator.accumulate(model):
            loss = loss_of(case.model, model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().view(1)).mean()))
    assert len(norms) == len(steps)
    return losses, norms
