# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import threading

import pytest
import torch
from torch import nn

from fullshard.testing import LocalWorld
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.inspection.memory import Bytes
from fullshard.train.config import OptimConfig, learning_rate, resolve
from fullshard.train.loop import train_step
from fullshard.train.metrics import (
    NonFiniteError,
    Reporter,
    RunFolderError,
    Speed,
    new_run_folder,
    ranks_text,
)
from fullshard.train.run import NoRecord
from fullshard.train.torch.run import RankWorld, TorchRun, agree

CPU = torch.device("cpu")
ALONE = RankWorld(SoloComm(), CPU)


def on_ranks(size, function):
    """What ``function(world)`` returns on each rank, of ranks that are threads."""
    return LocalWorld(size).run(lambda comm: function(RankWorld(comm, CPU)))


class Points:
    """Sample ``n`` is the number ``values[n % len]``, its class always 0."""

    tokens_per_sample = 1
    token = "points"

    def __init__(self, values):
        self.values = torch.tensor(values)

    @property
    def validation_count(self):
        return len(self.values)

    def train_batch(self, seed, numbers):
        return self.validation_batch([number % len(self.values) for number in numbers])

    def validation_batch(self, positions):
        return self.values[list(positions)][:, None], torch.zeros(len(positions), dtype=torch.int64)

    def describe(self):
        return "points"


_generator = threading.Lock()  # torch's default generator is one for all threads


def make_run(world, values, *overrides):
    config = resolve(overrides=[f"train.batch={len(values)}", *overrides])
    with _generator:
        torch.manual_seed(0)
        model = nn.Linear(1, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return TorchRun(config, world, Points(values), model, optimizer, Bytes.unsharded(model))


def quiet(world):
    return Reporter(world, None, 1)


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_bad_loss_on_one_rank_turns_all_ranks_before_the_optimizer(choice):
    def one_step(world):
        run = make_run(world, [1.0, 2.0, float("nan")], f"train.on_nonfinite={choice}")
        before = [param.clone() for param in run.model.parameters()]
        try:
            outcome = train_step(run, 0, quiet(world))
        except NonFiniteError as error:
            outcome = str(error)
        after = list(run.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not run.optimizer.state
        return outcome

    outcomes = on_ranks(3, one_step)
    if choice == "stop":
        assert all("step 1: loss or gradient is not finite on rank 2;" in o for o in outcomes)
    else:
        assert all("loss" in outcome for outcome in outcomes)


def test_a_good_step_moves_the_parameters_at_the_rate_of_the_schedule():
    def one_step(world):
        run = make_run(world, [1.0, 2.0], "optim.lr=0.5", "optim.warmup_steps=10")
        before = run.model.weight.clone()
        values = train_step(run, 4, quiet(world))
        assert not torch.equal(before, run.model.weight)
        return values["lr"], run.optimizer.param_groups[0]["lr"], values["loss"]

    first, second = on_ranks(2, one_step)
    assert first == second
    assert first[:2] == (0.25, 0.25)


def test_agreement_averages_losses_and_names_the_bad():
    losses = [torch.tensor(v) for v in (1.0, 2.0, 6.0)]
    fine = torch.tensor(1.0)
    assert on_ranks(3, lambda w: agree(w, losses[w.part[0]], fine)) == [(3.0, [])] * 3
    bad = [fine, torch.tensor(torch.inf), fine]
    assert [r for _, r in on_ranks(3, lambda w: agree(w, bad[w.part[0]], fine))] == [[1]] * 3
    nan = torch.tensor(torch.nan)  # a global norm is bad everywhere: the loss says whose fault
    assert [r for _, r in on_ranks(3, lambda w: agree(w, bad[w.part[0]], nan))] == [[1]] * 3
    assert [r for _, r in on_ranks(3, lambda w: agree(w, fine, nan))] == [[0, 1, 2]] * 3


class Waiting(NoRecord):
    def __init__(self, waits_s):
        self.waits_s = waits_s

    def take_recent(self):
        return 10.0, self.waits_s


def test_the_slowest_rank_is_the_one_that_waits_least():
    def now(world):
        run = make_run(world, [1.0, 2.0, 3.0])
        plain = run.ranks_now()
        run.record = Waiting([4.0, 1.0, 4.0][world.part[0]])
        return plain, run.ranks_now()

    for plain, told in on_ranks(3, now):
        assert plain.keys() == {"memory_least_bytes", "memory_most_bytes"}
        assert told["slowest_rank"] == 1
        assert told["exposed_share"] == pytest.approx(0.3)
        assert told["ahead_of_slowest_share"] == pytest.approx(0.2)
        assert ranks_text(told).endswith("waiting 30%  slowest rank 1 by 20%")
    apart = {"memory_least_bytes": 2**30, "memory_most_bytes": 2**31}
    assert ranks_text(apart) == "ranks 1.00 to 2.00 GiB"
    alike = {"exposed_share": 0.3, "slowest_rank": 1, "ahead_of_slowest_share": 0.02}
    assert ranks_text(alike) == "waiting 30%"
    assert ranks_text({}) == ""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_validation_is_the_same_for_any_world_and_counts_each_sample_once(size):
    values = [0.5, -1.0, 2.0, 3.0, -4.0, 0.1]

    def both(world):
        run = make_run(world, values)
        run = dataclasses.replace(run, data=Points(values[:5]))  # 5 samples: some ranks run out
        return run.evaluate(), run.model.training

    model = make_run(ALONE, values).model
    logits = model(torch.tensor(values[:5])[:, None])
    loss = nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.int64)).item()
    right = (logits.argmax(1) == 0).double().mean().item()
    for (measured, accuracy), training in on_ranks(size, both):
        assert measured == pytest.approx(loss, rel=1e-6)
        assert accuracy == pytest.approx(right)
        assert training


def test_learning_rate_rises_then_falls_as_a_cosine():
    optim = OptimConfig(lr=2.0, warmup_steps=4, final_lr_share=0.1)
    rates = [learning_rate(optim, 105, step) for step in range(105)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[54] == pytest.approx((2.0 + 0.2) / 2)
    assert rates[104] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(OptimConfig(lr=2.0, warmup_steps=0), 1, 0) == 2.0


def test_no_clipping_leaves_gradients_and_still_gives_the_norm():
    run = make_run(ALONE, [100.0], "optim.clip_norm=0")
    values = train_step(run, 0, quiet(run.world))
    grads = torch.cat([param.grad.flatten() for param in run.model.parameters()])
    assert values["grad_norm"] == pytest.approx(grads.norm().item())
    assert values["grad_norm"] > 1


def test_a_taken_run_folder_is_left_alone(tmp_path):
    paths = [new_run_folder(str(tmp_path / "runs"), "name") for _ in range(3)]
    assert [path.name for path in paths] == ["name", "name-2", "name-3"]


def test_metrics_are_json_even_where_a_value_is_not_finite(tmp_path):
    reporter = Reporter(ALONE, tmp_path, 2)
    reporter.record("train", 1, {"loss": float("nan"), "grad_norm": 2.5})
    reporter.validation(2, 1.25, 0.5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [line.pop("time") for line in lines]
    assert 1.7e9 < times[0] <= times[1]  # seconds since 1970
    assert lines == [
        {"kind": "train", "step": 1, "loss": None, "grad_norm": 2.5},
        {"kind": "validation", "step": 2, "loss": 1.25, "accuracy": 0.5},
    ]


def test_a_full_disk_is_said_in_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    reporter = Reporter(ALONE, tmp_path, 1)
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl': No space left .*set log.folder"):
        reporter.record("train", 1, {"loss": 1.0})


def test_speed_counts_only_the_time_of_steps(monkeypatch):
    now = iter([10.0, 12.0, 50.0, 52.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    speed = Speed(flops_per_token=3e9, ranks=2, peak_flops=1.5e12)
    for _ in range(2):
        speed.start()
        speed.stop(tokens=1000)
    rates = speed.take()
    assert rates == {"tokens_per_s": 500.0, "tflops_per_s": 1.5, "mfu": 0.5}
    assert speed.take()["tokens_per_s"] == 0.0
    assert "mfu" not in Speed(1.0, 1, None).take()


def test_unsharded_bytes_are_what_adamw_takes():
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    state = sum(t.nbytes for entry in optimizer.state.values() for t in entry.values())
    computed = Bytes.unsharded(model)
    assert computed.optimizer_bytes == state
    assert computed.parameters_bytes == computed.gradients_bytes == 4 * (15 + 3 + 3 + 3)
