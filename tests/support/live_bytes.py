# SPDX-License-Identifier: Apache-2.0
"""The memory that tensors hold while a program runs, on fake tensors, too."""

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of living storages of ``least`` bytes or more, but ``below``; ``most`` at a time."""

    def __init__(self, least, below=1 << 62):
        super().__init__()
        self.sizes = range(least, below)
        self.now, self.most, self._seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it runs on local tensors next
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage.nbytes() not in self.sizes:
                continue
            if storage._cdata in self._seen:
                continue
            self._seen.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _gone(self, key, size):
        self._seen.discard(key)
        self.now -= size
