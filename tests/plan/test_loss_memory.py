# SPDX-License-Identifier: Apache-2.0
"""The loss's memory is what eager trainers hold, measured on fake tensors."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.live_bytes import LiveBytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.plan import Loss
from fullshard.plan.model.work import Pricer


@pytest.mark.parametrize("vocab", [32_000, 152_064, 262_144])
@pytest.mark.parametrize(
    ("loss", "per_logit"),
    [(Loss.PLAIN, 22), (Loss.KEPT, 16), (Loss.FREED, 12), (Loss.NATIVE, 8)],
)
def test_a_loss_holds_as_much_as_on_fake_tensors(loss, per_logit, vocab):
    tokens = 512
    head = Pricer(tokens, tokens, 2).head(64, vocab, loss, trained=True)
    saved = sum(each.saved_bytes for each in head)
    assert saved + head[-1].backward_scratch_bytes == per_logit * tokens * vocab
    measured = loss_bytes(tokens, vocab, loss)
    assert measured == pytest.approx(per_logit * tokens * vocab, rel=0.01)


def loss_bytes(tokens, vocab, loss):
    """The most bytes of full logits' size that live in backward, measured on fake tensors."""
    samples = 2
    live = LiveBytes(least=(tokens - samples) * vocab)
    with FakeTensorMode(), live:
        hidden = torch.empty(samples, tokens // 2, 64, dtype=torch.bfloat16, requires_grad=True)
        logits = F.linear(hidden, torch.empty(vocab, 64, dtype=torch.bfloat16))
        wide = logits if loss is Loss.NATIVE else logits.float()
        whole = loss in (Loss.FREED, Loss.NATIVE)
        used = wide if whole else wide[:, :-1].contiguous()
        labels = torch.empty(used.numel() // vocab, dtype=torch.long)
        scalar = F.cross_entropy(used.flatten(0, 1), labels)
        if loss is not Loss.PLAIN:
            del logits, used
        if loss is Loss.FREED:
            del wide
        live.most = 0
        scalar.backward()
    return live.most


def test_a_loss_over_a_cut_vocabulary_holds_as_much_as_that_of_dtensors():
    degree, tokens, width, vocab = 8, 256, 8, 8192
    part = tokens * vocab // degree
    head = Pricer(tokens, tokens, 2).head(
        width, vocab // degree, Loss.FREED, trained=True, degree=degree
    )
    live = LiveBytes(least=part, below=2 * degree * part)  # whole ones are DTensors' shapes alone
    with fake_mesh(degree) as mesh, loss_parallel():
        layer = nn.Linear(width, vocab, bias=False, dtype=torch.bfloat16)
        plan = ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        )
        parallelize_module(layer, mesh, plan)
        hidden = torch.zeros(1, tokens // degree, width, dtype=torch.bfloat16, requires_grad=True)
        with live:
            logits = layer(hidden)
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), torch.zeros(tokens, dtype=torch.long)
            )
            del logits
            live.most = 0
            loss.backward()
    assert sum(each.saved_bytes for each in head) + head[-1].backward_scratch_bytes == live.most


def test_callers_that_keep_logits_gather_them_whole():
    tokens, vocab = 256, 8192
    price = Pricer(tokens, tokens, 2)
    for loss, per_logit in ((Loss.NATIVE, 8), (Loss.PLAIN, 22)):
        head = price.head(8, vocab // 8, loss, trained=True, degree=8)
        assert [each.name for each in head] == ["head", "logits", "loss"]
        assert head[1].forward.bytes == 2 * tokens * vocab * 7 / 8
        held = sum(each.saved_bytes for each in head) + head[-1].backward_scratch_bytes
        assert held == per_logit * tokens * vocab


def test_products_that_devices_share_keep_the_gathered_output_of_the_norm_before_them():
    degree, tokens, width = 4, 256, 64
    norm = Pricer(tokens // degree, tokens, 2).norm("norm", width, gathered=degree)
    kept = {}

    def keep(tensor):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        kept[local.untyped_storage()._cdata] = tuple(local.shape)
        return tensor

    with fake_mesh(degree) as mesh:
        layer = nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16)
        parallelize_module(layer, mesh, ColwiseParallel(input_layouts=Shard(1)))
        hidden = torch.zeros(1, tokens // degree, width, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(hidden)
    assert (tokens, width) in kept.values()
    assert norm.saved_bytes == 2 * tokens * width


@contextmanager
def fake_mesh(degree):
    """A mesh of ``degree`` devices whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=degree)
    try:
        yield init_device_mesh("cpu", (degree,))
    finally:
        dist.destroy_process_group()
