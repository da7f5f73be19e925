# SPDX-License-Identifier: Apache-2.0
"""The loss's memory is what eager trainers hold, measured on fake tensors."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.plan import Loss
from fullshard.plan.model.work import Pricer


@pytest.mark.parametrize("vocab", [32_000, 152_064, 262_144])
@pytest.mark.parametrize(("loss", "per_logit"), [(Loss.PLAIN, 18), (Loss.FREED, 12)])
def test_a_loss_holds_as_much_as_on_fake_tensors(loss, per_logit, vocab):
    tokens = 512
    head = Pricer(tokens, tokens, 2).head(64, vocab, loss, trained=True)
    saved = sum(each.saved_bytes for each in head)
    assert saved + head[-1].backward_scratch_bytes == per_logit * tokens * vocab
    assert loss_bytes(tokens, vocab, kept=loss is Loss.PLAIN) == per_logit * tokens * vocab


def loss_bytes(tokens, vocab, *, kept):
    """The most bytes of full logits' size that live in backward, measured on fake tensors."""
    live = LiveBytes(least=tokens * vocab)
    with FakeTensorMode(), live:
        hidden = torch.empty(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        logits = F.linear(hidden, torch.empty(vocab, 64, dtype=torch.bfloat16))
        wide = logits.float()
        loss = F.cross_entropy(wide, torch.empty(tokens, dtype=torch.long))
        if not kept:
            del logits, wide
        live.most = 0
        loss.backward()
    return live.most


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of at least ``least`` bytes that are alive; ``most`` at a time."""

    def __init__(self, least):
        super().__init__()
        self.least, self.now, self.most, self._seen = least, 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage.nbytes() < self.least or storage._cdata in self._seen:
                continue
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, key, size):
        self._seen.discard(key)
        self.now -= size
