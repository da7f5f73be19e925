# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for fp16, with the signature of FSDP1's scaler.

`torch.amp.GradScaler` is right on sharded gradients as it is: an inf or NaN in the span of one rank
is found on all ranks that share the parameter (`fullshard.torch.tensor.reductions.unscale`), so
that all skip the step and scale down together. `ShardedGradScaler` covers what torch's cannot see.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fullshard.core.strategy import ShardingStrategy
from fullshard.torch.comm.protocol import Comm, SoloComm
from fullshard.torch.comm.ranks import Where, ranks_of


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` whose found inf is that of all ranks of ``process_group``.

    Use it instead of torch's where not all ranks share every parameter: pipeline stages, experts on
    a mesh of their own, parameters that are ignored by sharding and differ from rank to rank. It
    also unscales fp16 gradients, which torch's refuses. ``unscale_`` and ``step`` are collective
    over ``process_group``, by default that of all ranks, and cost one all-reduce of one number for
    each optimizer. The other arguments are torch's.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Where = None,
    ):
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._where = process_group

    def _comm(self) -> Comm:
        if self._where is None and not dist.is_initialized():
            return SoloComm()
        return ranks_of(self._where, ShardingStrategy.FULL_SHARD.sharding).gather

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return found infs by device, equal on all ranks, even on one without gradients."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
        comm = self._comm()
        if comm.size > 1:
            everywhere = sum((each.to(found_inf.device) for each in found.values()), found_inf)
            comm.all_reduce([everywhere], "max", label="found inf").wait()
            for each in found.values():
                each.copy_(everywhere)
            found.setdefault(found_inf.device, everywhere)
        return found
