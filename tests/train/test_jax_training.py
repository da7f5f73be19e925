# SPDX-License-Identifier: Apache-2.0
"""`fullshard train --engine jax` against the torch engine, from the same file of weights."""

import dataclasses
import signal

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import jax_models as models

from fullshard.checkpoint import Files, open_checkpoint, steps_in
from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS, Transformer
from fullshard.jax import create_mesh, load_checkpoint, make_train_step, save_checkpoint
from fullshard.jax.mesh import devices_of_process
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.inspection.memory import Bytes
from fullshard.train.config import resolve
from fullshard.train.data import load
from fullshard.train.jax.launch import build_model, launch, prepare
from fullshard.train.jax.optimizer import adamw
from fullshard.train.jax.run import loss_of
from fullshard.train.loop import conclude, fit, train_step
from fullshard.train.metrics import NonFiniteError, Reporter
from fullshard.train.signals import COME_AGAIN, StopRequest
from fullshard.train.survival import CHECKPOINTS, RunCheckpoints
from fullshard.train.torch import launch as torch_launch
from fullshard.train.torch.run import RankWorld, TorchRun

STEPS, DEVICES = 20, 4
ONE = RankWorld(SoloComm(), torch.device("cpu"))


@pytest.fixture(scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TRANSFORMERS, "tiny", Transformer(2, 32, 4, 2, 48, 256, context=16))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("run")
    texts = folder / "texts"
    texts.mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        words = random.choice(["to", "be", "or", "not", "that", "is", "the"], 400)
        (texts / f"{number}.txt").write_text(" ".join(words))
    weights = folder / "start.safetensors"
    overrides = [
        f"data.paths={texts}",
        f"train.steps={STEPS}",
        f"train.initial_weights={weights}",
        f"log.folder={folder / 'runs'}",
        "model.preset=tiny",
        "optim.lr=0.03",
        "data.validation_samples=11",  # no multiple of the batch
        "optim.warmup_steps=4",
        "log.sample_bytes=3",
    ]
    config = resolve(overrides=overrides)
    torch.manual_seed(1)
    save_file(torch_launch.build_model(config).state_dict(), weights)
    return config


@pytest.fixture(scope="module")
def by_torch(config):
    """Losses, norms and rates of all steps, and the validation after them."""
    plain = torch_launch.build_model(config)
    plain.load_state_dict(load_file(config.train.initial_weights))
    run = torch_run(config, load(config), plain)
    steps = [train_step(run, step, Reporter(ONE, None, 1)) for step in range(STEPS)]
    return steps, run.evaluate(), plain


def torch_run(config, data, plain):
    optimizer = torch_launch.make_optimizer(plain, config.optim)
    return TorchRun(config, ONE, data, plain, optimizer, Bytes.unsharded(plain))


@pytest.fixture(scope="module")
def by_jax(config):
    run = prepare(config, jax.devices()[:DEVICES])
    return run, [train_step(run, step, Reporter(run.world, None, 1)) for step in range(STEPS)]


def copy_of(run, **changed):
    """The run with a state of its own: a step uses its state up."""
    return dataclasses.replace(run, state=jax.tree.map(lambda x: x.copy(), run.state), **changed)


def test_losses_norms_and_rates_are_those_of_the_torch_engine(by_torch, by_jax):
    run, steps = by_jax
    for mine, theirs in zip(steps, by_torch[0], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["lr"] == theirs["lr"]
    assert steps[-1]["loss"] < steps[0]["loss"] / 1.3
    assert run.step.compilations == 1


def test_validation_counts_each_sample_once(by_torch, by_jax):
    loss, accuracy = by_jax[0].evaluate()
    assert loss == pytest.approx(by_torch[1][0], abs=1e-4)
    assert accuracy == pytest.approx(by_torch[1][1], abs=2 / (11 * 16))


def test_the_end_leaves_weights_for_torch_and_tells_exact_bytes(by_torch, by_jax, tmp_path, capsys):
    run, _ = by_jax
    conclude(run, Reporter(run.world, tmp_path, 1))
    trained = by_torch[2].state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == trained.keys()
    for name, value in found.items():
        assert torch.allclose(value, trained[name], atol=2e-3), name
    rows = {name: (mine, whole) for name, mine, whole in run.bytes_rows()}
    mine, whole = rows["parameters"]
    assert whole == sum(value.nbytes for value in trained.values())
    on_one = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(run.state.params)]
    assert mine == sum(on_one) == whole // DEVICES
    moments = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(run.state.optimizer)]
    assert rows["optimizer state"][0] == sum(moments) < whole * 2 / DEVICES + 100
    temporary, _ = rows["full units and activations in a step, at most"]
    assert rows["peak, with activations"][0] > mine * 3 + temporary
    printed = capsys.readouterr().out
    assert "each device" in printed
    assert "A sample of what it writes after 'def '" in printed
    assert "model.safetensors" in printed


# -- runs that end and go on --------------------------------------------------------------------


class Killed(Exception):
    """Stands for SIGKILL: nothing after it runs."""


class FailingData:
    """The data of a run; step ``fail_at`` does not get its batch."""

    def __init__(self, data, fail_at):
        self._data, self._fail_at = data, fail_at

    def __getattr__(self, name):
        return getattr(self._data, name)

    def train_batch(self, seed, numbers):
        if numbers[0] // len(numbers) == self._fail_at:
            raise Killed
        return self._data.train_batch(seed, numbers)


def train_on(run, folder, steps, fail_at=None, **changed):
    """Train a copy of ``run``; the last state, and the losses by step."""
    config = run.config
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        log=dataclasses.replace(config.log, every=1),
        checkpoint=dataclasses.replace(config.checkpoint, every=2, **changed.pop("keep", {})),
    )
    run = copy_of(run, config=config, data=FailingData(run.data, fail_at))
    reporter, losses = Reporter(run.world, folder, steps), {}
    reporter.step = lambda step, values, token: losses.setdefault(step, values["loss"])
    checkpoints = RunCheckpoints(run, folder, reporter, changed.get("stop", StopRequest()))
    try:
        fit(run, reporter, checkpoints)
    finally:
        checkpoints.finish()
    return run.state, losses


def test_stopped_and_resumed_it_is_the_same_bit_by_bit(by_jax, by_torch, tmp_path):
    run, _ = by_jax
    expected, losses = train_on(run, tmp_path / "whole", 5)
    with pytest.raises(Killed):
        train_on(run, tmp_path / "cut", 5, fail_at=3)
    elsewhere = dataclasses.replace(run, state=jax.tree.map(lambda x: x * 0, run.state))
    found, again = train_on(elsewhere, tmp_path / "cut", 5)
    assert again == {step: losses[step] for step in (3, 4, 5)}
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert one.sharding == other.sharding
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert run.step.compilations == 1

    other, reporter = torch_run(run.config, run.data, by_torch[2]), Reporter(ONE, None, 1)
    assert RunCheckpoints(other, tmp_path / "cut", reporter, StopRequest()).resume() == 4
    values = train_step(other, 4, reporter)
    assert values["loss"] == pytest.approx(losses[5], abs=1e-4)


def test_a_signal_saves_and_leaves_and_old_steps_go(by_jax, tmp_path):
    run, _ = by_jax
    stop = StopRequest()
    keep = {"keep": 1, "asynchronous": False}
    train_on(run, tmp_path, 4, keep=keep)
    assert [each.step for each in steps_in(Files(), tmp_path / CHECKPOINTS)] == [4]
    stop.signal = signal.SIGTERM
    with pytest.raises(SystemExit) as left:
        train_on(run, tmp_path, 6, stop=stop)
    assert left.value.code == COME_AGAIN
    saved = open_checkpoint(tmp_path / CHECKPOINTS)
    assert (saved.step, saved.extra) == (5, {"position": 5 * run.config.train.batch})


def test_a_damaged_step_is_left_for_the_one_before_and_another_batch_is_refused(by_jax, tmp_path):
    run, _ = by_jax
    train_on(run, tmp_path, 4)
    file = tmp_path / CHECKPOINTS / "step-000000000004" / "00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="falling back to step 2"):
        assert list(train_on(run, tmp_path, 3)[1]) == [3]
    train = dataclasses.replace(run.config.train, batch=4)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))
    with (
        pytest.warns(RuntimeWarning, match="falling back"),
        pytest.raises(ConfigurationError, match="sample 16, which is no multiple"),
    ):
        train_on(other, tmp_path, 3)


def with_norm(run, value):
    """The run with a state of its own, in which the scale of the last norm is ``value``."""
    run = copy_of(run)
    norm = {"scale": np.full(32, value, np.float32)}
    params = {**run.state.params, "norm": norm}
    run.state = dataclasses.replace(run.state, params=params)
    return run


def test_what_is_not_finite_is_not_saved(by_jax, tmp_path, capsys):
    run, _ = by_jax
    reporter = Reporter(run.world, tmp_path, 4)
    stop = StopRequest()
    stop.signal = signal.SIGTERM
    spoilt = with_norm(run, np.inf)
    checkpoints = RunCheckpoints(spoilt, tmp_path, reporter, stop)
    with pytest.raises(SystemExit):
        checkpoints.after_step(2)
    said = capsys.readouterr().out
    assert "step 2: parameters or optimizer state are not finite" in said
    assert "signal received: step 2 is not saved" in said
    assert checkpoints.resume() == 0


def test_a_checkpoint_goes_over_devices_that_divide_nothing(by_jax, config, tmp_path):
    run, _ = by_jax
    three = make_train_step(
        build_model(config)[0],
        adamw(config.optim, STEPS),
        loss_of,
        create_mesh(3, devices=jax.devices()[:3]),
    )
    assert any(not each.sharded for each in three.placements)
    save_checkpoint(tmp_path / "4", run.state, step=1, names=run.layout[0])
    names = dataclasses.replace(run, step=three).layout[0]
    moved = load_checkpoint(tmp_path / "4", three.abstract_state(), names=names).state
    save_checkpoint(tmp_path / "3", moved, step=1, names=names)
    back = load_checkpoint(tmp_path / "3", run.step.abstract_state(), names=run.layout[0]).state
    for one, other in zip(jax.tree.leaves(run.state), jax.tree.leaves(back), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_what_is_not_finite_is_not_used(by_jax, choice):
    run, _ = by_jax
    train = dataclasses.replace(run.config.train, on_nonfinite=choice)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))
    run = with_norm(run, np.nan)
    before = models.held((run.state.params, run.state.optimizer))
    reporter = Reporter(run.world, None, 1)
    if choice == "stop":
        with pytest.raises(NonFiniteError, match="step 3: loss or gradient is not finite on a dev"):
            train_step(run, 2, reporter)
        return
    values = train_step(run, 2, reporter)
    assert not np.isfinite(values["loss"])
    for key, value in models.held((run.state.params, run.state.optimizer)).items():
        if key not in ("1.step", "1.grad_norm"):
            assert np.array_equal(value, before[key], equal_nan=True), key


@pytest.mark.parametrize(
    ("nproc", "overrides", "message"),
    [
        (3, [], "train.batch=8 samples do not divide over 3 ranks"),
        (0, [], "--nproc must be at least 1, got 0"),
        (99, [], "--nproc 99 devices are asked for, but JAX has 8"),
        (2, ["data.paths=nowhere"], "no such file or folder for the corpus"),
    ],
)
def test_what_cannot_be_is_refused_before_a_folder_is_made(tmp_path, nproc, overrides, message):
    config = resolve(None, [f"log.folder={tmp_path / 'runs'}", *overrides], engine="jax")
    with pytest.raises(ConfigurationError, match=message):
        launch(config, nproc)
    assert not list(tmp_path.iterdir())


def test_a_trace_is_the_torch_engines():
    with pytest.raises(ConfigurationError, match=r"log\.trace is kept by the torch engine only"):
        resolve(None, ["log.trace=true"], engine="jax")


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({}, None),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, [3]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}, [1]),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5"}, None),
    ],
)
def test_processes_of_a_host_share_its_accelerators(environ, devices):
    assert devices_of_process(environ) == devices
