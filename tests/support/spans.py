# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters without a model, cut as a unit that holds them all would cut them."""

import torch

from fullshard.core.layout import lay_out
from fullshard.core.spec import ParamSpec
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.parameter import ShardedParameter


def drawn(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def sharded(comm, fulls):
    specs = [ParamSpec(f"p{i}", tuple(x.shape), "float32", True) for i, x in enumerate(fulls)]
    (segment,) = lay_out(specs, comm.size).segments
    made = []
    for slot, full in zip(segment.slots, fulls, strict=True):
        own = Ownership(slot.spec.name, slot.spec.shape, segment.spans(slot), comm)
        made.append(ShardedParameter.parameter(own.cut(full).clone(), own))
    return made


def set_grads(params, grads):
    """Give each parameter, sharded or not, its gradient in its own form."""
    for param, grad in zip(params, grads, strict=True):
        if isinstance(param, ShardedParameter):
            grad = ShardedParameter.value(param.ownership.cut(grad).clone(), param.ownership)
        param.grad = grad
