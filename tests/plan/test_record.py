# SPDX-License-Identifier: Apache-2.0
"""A finished run corrects its device, and the next forecast by that device is near."""

from dataclasses import replace

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.plan import cluster_of, named_device, named_model, predict
from fullshard.plan.cluster.devices import fitted_constants
from fullshard.plan.record import corrected, device_toml, read_record
from fullshard.plan.run import Recompute

TOLD = """\
model = "llama3-8b"
device = "h100"
devices = 8
micro-batch = 1
recompute = "full"
loss = "freed"
compiled = true
tokens_per_s = 7000.0
memory_gib = 40.0
"""


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOLD)
    return read_record(path)


def test_a_record_is_predicted_as_it_was_measured(record, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(device_toml(corrected(record), "a run"))
    device = named_device(str(file))
    assert device.origin == "a run"
    found = predict(record.model, record.run, cluster_of(device, 8))
    assert found.tokens_per_s == pytest.approx(7000, rel=0.02)
    assert found.memory.reserved_bytes / 2**30 == pytest.approx(40, rel=0.01)


def test_another_model_is_as_much_slower_as_the_record_was(record):
    device, other = corrected(record), named_model("llama2-7b")
    before = predict(record.model, record.run, record.cluster).tokens_per_s
    usual = predict(other, record.run, record.cluster).tokens_per_s
    after = predict(other, record.run, replace(record.cluster, device=device)).tokens_per_s
    assert after / usual == pytest.approx(7000 / before, rel=0.05)


def test_a_run_on_one_device_says_nothing_of_links(record):
    usual = fitted_constants()
    alone = replace(record, cluster=cluster_of(record.cluster.device, 1), reserved_bytes=None)
    for each, kept in ((record, False), (alone, True)):
        found = corrected(each).constants
        assert found.matmul_share != usual.matmul_share
        assert (found.inside_share == usual.inside_share) is kept
        assert (found.between_share == usual.between_share) is kept


def changed_by(record, **fields):
    """How much longer steps take by the record, and steps of runs with other fields."""
    device = corrected(record)
    times = []
    for run in (record.run, replace(record.run, **fields)):
        clusters = (record.cluster, replace(record.cluster, device=device))
        usual, now = (predict(record.model, run, each).step_s for each in clusters)
        times.append(now / usual)
    return times


def test_a_short_run_tells_of_its_host_and_loop_and_a_long_one_is_as_it_was(record):
    short = replace(record.run, sequence=256, recompute=Recompute.NONE, compiled=False)
    usual = predict(named_model("llama3.2-1b"), short, record.cluster).tokens_per_s
    slow = replace(
        record,
        model=named_model("llama3.2-1b"),
        run=short,
        tokens_per_s=usual / 2,
        reserved_bytes=None,
    )
    own, longer = changed_by(slow, sequence=8192)
    assert own == pytest.approx(2, rel=0.1)
    assert longer < 1.35


def test_a_long_run_tells_of_its_program(record):
    usual = predict(record.model, record.run, record.cluster).tokens_per_s
    slow = replace(record, tokens_per_s=usual / 1.4, reserved_bytes=None)
    own, longer = changed_by(slow, micro_batch=2)
    assert own == pytest.approx(1.4, rel=0.05)
    assert longer == pytest.approx(own, rel=0.03)


def test_what_is_less_than_runs_of_one_loop_differ_by_is_taken_over_in_part(record):
    usual = predict(record.model, record.run, record.cluster).tokens_per_s
    slow = replace(record, tokens_per_s=usual / 1.1, reserved_bytes=None)
    assert 1.05 < changed_by(slow)[0] < 1.099


def test_memory_that_a_record_has_more_is_bytes_of_any_run(record):
    told = predict(record.model, record.run, record.cluster).memory.reserved_bytes
    device = corrected(replace(record, reserved_bytes=told + 2**30))
    longer = replace(record.run, micro_batch=2)
    usual = predict(record.model, longer, record.cluster).memory.reserved_bytes
    found = predict(record.model, longer, replace(record.cluster, device=device))
    assert found.memory.reserved_bytes - usual == pytest.approx(2**30, rel=0.001)


def test_half_of_what_a_run_with_full_memory_lost_is_taken_for_its_loop(record):
    full = replace(record, run=replace(record.run, micro_batch=4), reserved_bytes=None)
    usual = predict(full.model, full.run, full.cluster).tokens_per_s
    device = corrected(replace(full, tokens_per_s=0.64 * usual))
    after = predict(full.model, full.run, replace(full.cluster, device=device)).tokens_per_s
    assert after == pytest.approx(0.8 * usual, rel=0.02)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("devices = 8\n", "does not say devices"),
        ("tokens_per_s = 7000.0", "tokens_per_s must be a number"),
        ('recompute = "full"', "ful"),
    ],
)
def test_what_cannot_be_a_record_is_refused(changed, said, tmp_path):
    path = tmp_path / "run.toml"
    other = {"devices = 8\n": "", "tokens_per_s = 7000.0": 'tokens_per_s = "fast"'}
    path.write_text(TOLD.replace(changed, other.get(changed, 'recompute = "ful"')))
    with pytest.raises(ConfigurationError, match=said):
        read_record(path)


def test_a_record_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read_record(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens_per_s": 7000.0 * 64}, "tokens_per_s is that of one device"),
        ({"tokens_per_s": 7.0}, "where 0.* was expected"),
        ({"reserved_bytes": 2**30}, "tensors alone take about"),
        ({"reserved_bytes": 70_000 * 2**30}, "what torch reserved on one device"),
    ],
)
def test_a_speed_or_a_peak_that_no_device_has_corrects_nothing(record, changed, said):
    with pytest.raises(ConfigurationError, match=said):
        corrected(replace(record, **changed))
