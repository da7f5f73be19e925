# SPDX-License-Identifier: Apache-2.0
"""Published rows are read as what they say, and predicted within what was promised."""

import csv
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.limits import PROCESS_S

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import ShardingStrategy
from fullshard.plan import Loss, Recompute, predict

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks/data"
MOSAIC, PUBLISHED = DATA / "mosaicml_fsdp_throughput.csv", DATA / "published_fsdp_runs.csv"


@pytest.fixture(scope="module")
def rows():
    spec = importlib.util.spec_from_file_location("plan_rows", ROOT / "benchmarks/plan_rows.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_rows"] = module
    spec.loader.exec_module(module)
    return module


def told(rows, file, **lists):
    """Return the rows of a file, each with what is predicted for it."""
    read = rows.read_rows(DATA / file, **lists)
    return [(row, predict(row.model, row.run, row.cluster)) for row in read]


@pytest.fixture(scope="module")
def unseen(rows):
    """Return the rows of sources to which nothing is fitted, as `told`, and those that failed."""
    failed = []
    return told(rows, "unseen/unseen_fsdp_runs.csv", failed=failed), failed


def test_rows_say_what_was_run(rows):
    mosaic = rows.read_rows(MOSAIC)
    assert len(mosaic) == 111
    first = mosaic[0]
    assert (first.model.name, first.cluster.devices, first.run.micro_batch) == ("mpt-70b", 512, 8)
    assert first.run.recompute is Recompute.FULL
    kept = [each for each in mosaic if each.run.strategy is ShardingStrategy.SHARD_GRAD_OP]
    assert {each.cluster.device.key for each in kept} == {"h100"}

    published = rows.read_rows(PUBLISHED)
    assert len(published) == 45  # one ran out of memory
    by_label = {each.label: each for each in published}
    largest = next(each for label, each in by_label.items() if "405B" in label)
    assert largest.run.tensor_parallel == 8
    some = next(each for label, each in by_label.items() if "50 layers" in label)
    assert sum(map(some.run.recomputed, range(80))) == 50
    told = next(each for each in published if each.group == "IB1" and "H100" in each.label)
    assert told.cluster.between.bandwidth == pytest.approx(800e9 / 8 / 8)
    iteration = next(each for each in published if each.group == "YA1")
    assert iteration.tokens == pytest.approx(2048 / 0.9)


def test_predictions_keep_what_is_promised(rows):
    for file, mape, median in ((MOSAIC, 0.08, 0.06), (PUBLISHED, 0.12, 0.08)):
        errors = []
        for row in rows.read_rows(file):
            found = predict(row.model, row.run, row.cluster)
            errors.append(abs(found.tokens_per_s / row.tokens - 1))
        assert sum(errors) / len(errors) <= mape
        assert sorted(errors)[len(errors) // 2] <= median


def test_sources_that_no_constant_is_fitted_to_are_inside(rows, unseen):
    found, _ = unseen
    fitted = {each.group for file in (MOSAIC, PUBLISHED) for each in rows.read_rows(file)}
    assert len({row.group for row, _ in found}) >= 3
    assert not fitted & {row.group for row, _ in found}
    errors = [abs(each.tokens_per_s / row.tokens - 1) for row, each in found]
    assert sum(errors) / len(errors) <= 0.1
    inside = [
        each.interval.low_s <= each.step_s * each.tokens_per_s / row.tokens <= each.interval.high_s
        for row, each in found
    ]
    assert sum(inside) >= 0.85 * len(inside)


def test_published_runs_with_experts_on_their_own_axis(rows):
    """8 to 128 devices: what shrinks with their number is state, what does not are activations."""
    published = rows.read_rows(DATA / "unseen/expert_parallel.csv")
    assert {each.run.expert_parallel for each in published} == {1, 8}
    for row in published:
        found = predict(row.model, row.run, row.cluster)
        step_s = found.step_s * found.tokens_per_s / row.tokens
        assert found.interval.low_s <= step_s <= found.interval.high_s, row.label
        if row.memory_gib is not None:
            told = found.memory.reserved_bytes / 2**30
            assert told == pytest.approx(row.memory_gib, rel=0.06), row.label


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"note": "LoRA r32; chunked loss"}, lambda run: (run.lora_rank, run.loss.value)),
        (
            {"note": "LoRA r8 q,v; adapters in bf16; liger kernels"},
            lambda run: (run.lora_on.value, run.lora_dtype, run.fused_parts),
        ),
        ({"note": "flash_attention_3", "source": "a"}, lambda run: run.attention.value),
        ({"precision": "bf16-amp"}, lambda run: (run.compute_dtype, run.precision.compute)),
        ({"note": "accumulate 4; Liger loss"}, lambda run: (run.accumulate, run.loss.value)),
    ],
)
def test_what_a_row_says_of_its_trainer_is_read(rows, tmp_path, changes, read):
    expected = [
        (32, "chunked"),
        ("query-value", "bfloat16", True),
        "flash3",
        ("bfloat16", None),
        (4, "fused-linear"),
    ]
    assert read(changed_row(rows, tmp_path, changes).run) in expected


@pytest.mark.parametrize(
    ("changes", "devices", "per_host"),
    [({"n_gpu": "12"}, 12, 4), ({"peak_mem": "n/a", "note": "", "act_ckpt": ""}, 8, 8)],
)
def test_a_row_that_says_little_or_fills_no_hosts_is_predicted(
    rows, tmp_path, changes, devices, per_host
):
    row = changed_row(rows, tmp_path, changes)
    assert (row.cluster.devices, row.cluster.per_host) == (devices, per_host)
    assert predict(row.model, row.run, row.cluster).tokens_per_s > 0
    assert "peak_mem" not in changes or row.memory_gib is None


def test_the_benchmark_takes_any_file_in_these_formats(tmp_path):
    few = tmp_path / "others.csv"
    few.write_text("".join(PUBLISHED.read_text().splitlines(keepends=True)[:6]))
    script = ROOT / "benchmarks/plan_accuracy.py"
    done = subprocess.run(
        [sys.executable, script, few],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"MAPE \d+\.\d% median \d+\.\d% coverage \d+% over 5 rows", last), last


def test_a_file_in_another_format_is_refused(rows, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match="none of the two known formats"):
        rows.read_rows(other)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metric": "tok/s", "value": "46096"}, 5762),
        ({"metric": "step", "value": "2843.5", "unit": "ms"}, 5762),
        ({"metric": "TFLOPS/GPU", "value": "333.6"}, 5762),
        ({"metric": "MFU", "value": "33.73"}, 5762),
    ],
)
def test_other_metrics_are_the_same_speed(rows, tmp_path, changes, expected):
    assert changed_row(rows, tmp_path, changes).tokens == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({"parallelism": "HSDP", "n_gpu": "64"}, lambda row: row.run.replicas == 8),
        ({"parallelism": "HSDP8 DP2", "n_gpu": "16"}, lambda row: row.run.replicas == 2),
        ({"parallelism": "DDP8"}, lambda row: row.run.strategy is ShardingStrategy.NO_SHARD),
        ({"act_ckpt": "selective 4"}, lambda row: row.run.recompute_every == 4),
        ({"gpu": "H200-141GB"}, lambda row: row.cluster.device.key == "h200"),
        ({"gpu": "H100 80GB, 200Gb/s per GPU"}, lambda row: row.cluster.between.bandwidth == 25e9),
    ],
)
def test_other_configurations_are_understood(rows, tmp_path, changes, read):
    assert read(changed_row(rows, tmp_path, changes))


@pytest.mark.parametrize(
    ("note", "loss"),
    [
        ("torchtitan", Loss.FREED),
        ("torchtitan; compiled", Loss.COMPILED),
        ("torchtitan; compiled; freed loss", Loss.FREED),
        ("compiled", Loss.PLAIN),
        ("torchtitan; compiled; liger loss", Loss.FUSED_LINEAR),
        ("liger cross-entropy", Loss.FUSED),
    ],
)
def test_a_loss_is_the_one_that_is_told_or_that_of_the_trainer(rows, tmp_path, note, loss):
    """Torchtitan compiles its loss with the model, but for some months, whose rows say so."""
    told = {"note": note, "system": "", "source": ""}
    assert changed_row(rows, tmp_path, told).run.loss is loss


def test_what_is_not_understood_is_left_out_with_its_reason(rows, tmp_path):
    for change, said in (
        ({"value": "OOM"}, "no speed"),
        ({"parallelism": "PP4"}, "not planned"),
        ({"metric": "joy"}, "unknown metric"),
        ({"model": "Lama9-8B"}, "unknown model"),
        ({"gpu": "abacus"}, "unknown device"),
    ):
        skipped = []
        assert rows.read_rows(written(tmp_path, change), skipped) == []
        assert said in skipped[0]


def written(folder, changes):
    with PUBLISHED.open(newline="") as file:
        first = next(csv.DictReader(file))
    file = folder / "changed.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, first)
        writer.writeheader()
        writer.writerow({**first, **changes})
    return file


def changed_row(rows, folder, changes):
    return rows.read_rows(written(folder, changes))[0]


def test_memory_of_unseen_sources_is_told_within_ten_percent_and_no_failed_run_to_fit(unseen):
    (kept, failed), errors, large = unseen, [], []
    for row, found in kept:
        large.append(not found.fits)
        if row.memory_gib is not None:
            memory = found.memory
            held = memory.allocated_bytes if row.allocated else memory.reserved_bytes
            errors.append(held / 2**30 / row.memory_gib - 1)
    assert (len(kept), len(failed), len(errors)) == (105, 46, 87)
    assert sum(map(abs, errors)) / len(errors) <= 0.03
    assert -0.005 <= sum(errors) / len(errors) <= 0.08  # 0 to 8% is asked for
    assert not any(predict(row.model, row.run, row.cluster).fits for row in failed)
    assert sum(large) <= len(large) / 8


@pytest.mark.parametrize(
    ("file", "error", "width", "share"),
    [  # of the six rows of experts one is outside
        ("experts", 0.25, 2.1, 0.83),
        ("expert_parallel", 0.2, 2.3, 0.85),
        ("found_later", 0.13, 2.4, 0.85),
    ],
)
def test_sources_that_are_left_out_are_inside_and_intervals_not_wide(
    rows, file, error, width, share
):
    found = told(rows, f"unseen/{file}.csv")
    errors = [abs(each.tokens_per_s / row.tokens - 1) for row, each in found]
    assert sum(errors) / len(errors) <= error
    inside = [
        each.interval.low_s <= each.step_s * each.tokens_per_s / row.tokens <= each.interval.high_s
        for row, each in found
    ]
    assert sum(inside) >= share * len(inside)
    assert max(each.interval.high_s / each.interval.low_s for _, each in found) <= width


def test_memory_of_experts_is_told_and_their_speed_is_unsure(rows):
    failed = []
    kept = told(rows, "unseen/experts.csv", failed=failed)
    assert (len(kept), len(failed)) == (6, 18)
    for row, found in kept:
        error = found.memory.allocated_bytes / 2**30 / row.memory_gib - 1
        assert 0 <= error <= 0.10
        assert found.fits
        assert any("sent to experts" in each.name for each in found.interval.unknowns)
    assert not any(predict(row.model, row.run, row.cluster).fits for row in failed)


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", ""])
def test_a_row_without_a_speed_is_left_out_with_the_reason(rows, tmp_path, value):
    skipped = []
    assert rows.read_rows(written(tmp_path, {"value": value}), skipped) == []
    assert "no speed" in skipped[0]


def test_figures_are_read_with_separators_units_and_in_any_case(rows, tmp_path):
    changes = {"value": " 3,500 ", "act_ckpt": "None", "peak_mem": "40960 MiB"}
    row = changed_row(rows, tmp_path, {**changes, "metric": "tokens/sec/GPU"})
    assert (row.tokens, row.memory_gib, row.run.recompute) == (3500.0, 40.0, Recompute.NONE)
    failed = []
    assert rows.read_rows(written(tmp_path, {"value": " oom"}), failed=failed) == []
    assert len(failed) == 1


def test_sources_found_last_are_inside_but_for_those_that_the_page_calls_bad(rows):
    """KempnerForge on H200s, torchtitan on GB200s, OLMo-core, TinyLlama: nothing is fitted."""
    found = rows.read_rows(DATA / "unseen/found_2026_11_25.csv")
    assert len({each.group for each in found}) == 9
    known = [each for each in found if each.group in ("KF", "GB", "OC", "TL", "NG", "LF")]
    inside, speeds, memory = [], [], {"KF": [], "GB": []}
    for row in known:
        told = predict(row.model, row.run, row.cluster)
        speeds.append(abs(told.tokens_per_s / row.tokens - 1))
        inside.append(
            told.interval.low_s
            <= told.step_s * told.tokens_per_s / row.tokens
            <= told.interval.high_s
        )
        if row.memory_gib is not None:
            told = told.memory
            bytes_told = told.allocated_bytes if row.allocated else told.reserved_bytes
            memory[row.group].append(bytes_told / 2**30 / row.memory_gib - 1)
    assert sum(inside) >= 0.9 * len(inside)
    assert sum(speeds) / len(speeds) <= 0.13
    for errors in memory.values():
        assert sum(map(abs, errors)) / len(errors) <= 0.1


def test_a_row_may_name_a_config_and_say_hosts_precision_and_what_is_not_reduced(rows, tmp_path):
    (tmp_path / "own.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    changes = {"model": "own.json", "gpu": "H200, 4 a host", "n_gpu": "16"}
    changes |= {"precision": "fp16 reduce in fp32", "note": "accumulate 4; no sync; native loss"}
    row = changed_row(rows, tmp_path, changes)
    assert len(row.model.blocks) == 2
    assert (row.cluster.per_host, row.cluster.hosts) == (4, 4)
    assert (row.run.precision.compute, row.run.precision.reduce) == ("float16", "float32")
    assert (row.run.sync_each, row.run.loss.value) == (False, "native")


def test_rows_that_cannot_be_predicted_or_be_records_do_not_end_the_benchmark(tmp_path):
    with PUBLISHED.open(newline="") as file:
        first, second, third, *_ = csv.DictReader(file)
    odd = tmp_path / "odd.csv"
    with odd.open("w", newline="") as out:
        writer = csv.DictWriter(out, first)
        writer.writeheader()
        fp8 = {"gpu": "A100-80GB", "precision": "fp8", "value": "OOM"}
        writer.writerows([{**first, **fp8}, {**second, "value": "1e6"}, second, third])
    script = ROOT / "benchmarks/plan_accuracy.py"
    for more in ((), ("--record",)):
        command = [sys.executable, script, odd, *more]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROCESS_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "no matrix units for float8" in done.stdout
