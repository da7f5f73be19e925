# SPDX-License-Identifier: Apache-2.0
"""A calibration becomes a device of the planner."""

import pytest
import torch

from fullshard.cli import main
from fullshard.doctor import calibration as measuring
from fullshard.doctor.links import Links, LinkTime
from fullshard.plan import Run, Setup, cluster_of, named_device, named_model, predict, with_setting
from fullshard.plan.record import device_toml
from fullshard.testing import LocalWorld

LINKS = Links(
    ranks=2,
    backend="gloo",
    times=(LinkTime(1 << 20, 6e-3, 6e-3), LinkTime(1 << 24, 36e-3, 36e-3)),
    work_s=(1.0, 1.0),
    from_previous_s=(1.0, 1.0),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measuring, "_SHAPES", {"cpu": ((64, 64, 64), (8, 64, 64))})
    monkeypatch.setattr(measuring, "_BUFFER_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(measuring, "_LINK_BYTES", (1 << 10, 1 << 14))


def test_a_record_corrects_its_device_and_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fullshard.doctor.calibration.calibrate", None)
    record, out = tmp_path / "run.toml", tmp_path / "mine.toml"
    record.write_text('model = "llama2-7b"\ndevice = "a100"\ndevices = 8\ntokens_per_s = 3000.0\n')
    assert main(["calibrate", "--record", str(record), "--out", str(out)]) == 0
    assert "corrected by run.toml" in capsys.readouterr().out
    before, after = (
        predict(named_model("llama2-7b"), Run(), cluster_of(named_device(name), 8)).tokens_per_s
        for name in ("a100", str(out))
    )
    # The part of the difference by which runs differ anyhow is not taken over.
    assert 3000 < after < before


def test_a_line_through_two_sizes_is_bandwidth_and_latency():
    link = measuring.link_of(LINKS)
    assert link.bandwidth == pytest.approx(((1 << 24) - (1 << 20)) / 2 / 30e-3)
    assert link.latency_s == pytest.approx(4e-3)


def test_the_file_is_a_device_with_constants_of_its_own(small, tmp_path):
    alone = measuring.calibrate(torch.device("cpu"))
    assert alone.assumed == ("inside", "between")
    assert alone.fresh > 0
    file = tmp_path / "mine.toml"
    file.write_text(device_toml(alone, alone.origin), encoding="utf-8")
    device = named_device(str(file))
    assert device == alone
    assert (device.cpu, device.constants.memory_share, device.constants.straggle_s) == (True, 1, 0)
    setup = with_setting(Setup(Run(), cluster_of(device, 2)), "precision", "fp32")
    assert predict(named_model("nano"), setup.run, setup.cluster).cluster.hosts == 2


@pytest.mark.long
def test_ranks_measure_together_and_agree(small):
    def body(comm):
        return measuring.calibrate(torch.device("cpu"), comm, "threads")

    first, second = LocalWorld(2).run(body)
    assert (first.flops, first.bandwidth) == (second.flops, second.bandwidth)
    assert first.flops["float32"] > 0
    assert 0 <= first.constants.contention <= 1
    assert (first.per_host, first.assumed) == (2, ())
