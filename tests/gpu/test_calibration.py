# SPDX-License-Identifier: Apache-2.0
"""A calibration of a GPU: its own rates, and what the planner's list says of such GPUs beside."""

from fullshard.doctor.calibration import calibrate
from fullshard.plan.cluster.devices import device_of_driver, named_device
from fullshard.plan.record import device_toml


def test_rates_of_a_gpu(gpu, tmp_path):
    found = calibrate(gpu)
    assert found.host_link < found.bandwidth / 5
    assert found.context_bytes > 0
    assert found.assumed == ("inside", "between")
    known = device_of_driver(found.title)
    if known is not None:
        assert 0 < found.flops["bfloat16"] / known.flops["bfloat16"] <= 1
        assert 0 < found.bandwidth / known.bandwidth <= 1
        assert found.inside == known.inside
        assert found.attention.keys() == known.attention.keys()
    file = tmp_path / "mine.toml"
    file.write_text(device_toml(found, found.origin), encoding="utf-8")
    assert named_device(str(file)) == found
