# SPDX-License-Identifier: Apache-2.0
"""A training script in the manner of a user's, run as ranks by `test_distributed`.

What it prints beside its own log lines is one line of JSON. It does not clean up.
"""

import json

import fullshard as sft

sft.log("before joining")
sft.initialize_distributed_training(timeout_s=60)
sft.initialize_distributed_training()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from fullshard.torch import FullyShardedDataParallel, inspection  # noqa: E402

HELD_BYTES = 2**26  # by one of the two ranks

torch.set_num_threads(1)
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(16, 16).to(sft.get_device()))
for epoch in range(2):
    loss = model(torch.ones(2, 16)).square().mean()
    loss.backward()
    sft.log(f"Epoch {epoch}, loss {loss.item():.4f}")
sft.log("told by all", all_ranks=True)
held = bytearray(b"x" * HELD_BYTES) if dist.get_rank() else b""
memory = inspection.memory_of_ranks()
print(
    json.dumps(
        {
            "rank": dist.get_rank(),
            "size": dist.get_world_size(),
            "backend": dist.get_backend_config(),
            "ranks": [each.rank for each in memory],
            "heavier": memory[1].host_rss_bytes - memory[0].host_rss_bytes > HELD_BYTES // 2,
            "span": inspection.describe(model).parameters[0].span.numel,
        }
    ),
    flush=True,
)
