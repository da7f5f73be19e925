# SPDX-License-Identifier: Apache-2.0
import fullshard.jax

PUBLIC = """
Loaded Needs NeedsTable Placement Rule StepOptions StepTraffic StoredAs TrainState
TrainStep batch_sharding communication compare create_mesh cross_entropy describe describe_mesh
embed gathered generate global_batch initialize load_checkpoint load_weights make_train_step
memory_analysis overlap_flags save_checkpoint save_weights scan_layers selective shard shardings
threshold torch_layout torch_names
"""


def test_public_names():
    assert fullshard.jax.__all__ == PUBLIC.split()
    assert all(getattr(fullshard.jax, name).__doc__ for name in PUBLIC.split())
