# SPDX-License-Identifier: Apache-2.0
"""`fullshard train --engine jax` against the torch engine, from the same file of weights."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import TRANSFORMERS, Transformer
from fullshard.jax.arrays.mesh import devices_of_process
from fullshard.torch.inspection.memory_summary import Bytes
from fullshard.train.config import resolve
from fullshard.train.data import load
from fullshard.train.jax.closing import bytes_of, conclude
from fullshard.train.jax.launch import launch
from fullshard.train.jax.loop import evaluate, train_step
from fullshard.train.jax.setup import prepare
from fullshard.train.metrics import Reporter
from fullshard.train.summary import NonFiniteError
from fullshard.train.torch import loop as torch_loop
from fullshard.train.torch import setup as torch_setup
from fullshard.train.torch.world import World

STEPS, DEVICES = 20, 4
ONE = World(0, 1, torch.device("cpu"))


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
    save_file(torch_setup.build_model(config).module.state_dict(), weights)
    return config


@pytest.fixture(scope="module")
def by_torch(config):
    """Losses, norms and rates of all steps, and the validation after them."""
    plain = torch_setup.build_model(config)
    plain.module.load_state_dict(load_file(config.train.initial_weights))
    optimizer = torch_setup._adamw(plain.module, config.optim)
    bytes_ = Bytes.unsharded(plain.module)
    run = torch_setup.Run(config, ONE, load(config), plain.module, optimizer, 1.0, bytes_)
    steps = [torch_loop.train_step(run, step, Reporter(ONE, None, 1)) for step in range(STEPS)]
    return steps, torch_loop.evaluate(run), plain.module


@pytest.fixture(scope="module")
def by_jax(config):
    run, state = prepare(config, jax.devices()[:DEVICES])
    steps = []
    for step in range(STEPS):
        state, values = train_step(run, state, step, Reporter(run.devices, None, 1))
        steps.append(values)
    return run, state, steps


def test_losses_norms_and_rates_are_those_of_the_torch_engine(by_torch, by_jax):
    run, _, steps = by_jax
    for mine, theirs in zip(steps, by_torch[0], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert mine["lr"] == theirs["lr"]
    assert steps[-1]["loss"] < steps[0]["loss"] / 1.3
    assert run.step.compilations == 1


def test_validation_counts_each_sample_once(by_torch, by_jax):
    run, state, _ = by_jax
    loss, accuracy = evaluate(run, state)
    assert loss == pytest.approx(by_torch[1][0], abs=1e-4)
    assert accuracy == pytest.approx(by_torch[1][1], abs=2 / (11 * 16))


def test_the_end_leaves_weights_for_torch_and_tells_exact_bytes(by_torch, by_jax, tmp_path, capsys):
    run, state, _ = by_jax
    conclude(run, state, Reporter(run.devices, tmp_path, 1))
    trained = by_torch[2].state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == trained.keys()
    for name, value in found.items():
        assert torch.allclose(value, trained[name], atol=2e-3), name
    rows = {name: (mine, whole) for name, mine, whole in bytes_of(run)}
    mine, whole = rows["parameters"]
    assert whole == sum(value.nbytes for value in trained.values())
    on_one = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params)]
    assert mine == sum(on_one) == whole // DEVICES
    moments = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.optimizer)]
    assert rows["optimizer state"][0] == sum(moments) < whole * 2 / DEVICES + 100
    assert rows["peak of a step"][0] > mine * 3 + rows["temporary in a step, at most"][0]
    printed = capsys.readouterr().out
    assert "each device" in printed
    assert "A sample of what it writes after 'def '" in printed
    assert "model.safetensors" in printed


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_what_is_not_finite_is_not_used(by_jax, choice):
    run, state, _ = by_jax
    train = dataclasses.replace(run.config.train, on_nonfinite=choice)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))
    copy = jax.tree.map(lambda x: x.copy(), state)
    norm = np.full(32, np.nan, np.float32)
    copy = run.step.load_arrays(copy, [("parameters/norm.scale", norm)], strict=False)
    before = dict(run.step.arrays(copy, ("parameters", "optimizer")))
    reporter = Reporter(run.devices, None, 1)
    if choice == "stop":
        with pytest.raises(NonFiniteError, match="step 3: loss or gradient is not finite on a dev"):
            train_step(run, copy, 2, reporter)
        return
    after, values = train_step(run, copy, 2, reporter)
    assert not np.isfinite(values["loss"])
    for key, value in run.step.arrays(after, ("parameters", "optimizer")):
        if key not in ("optimizer/step", "optimizer/grad_norm"):
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


def test_two_processes_train_the_digits_together(tmp_path, unused_port):
    settings = ["--model=mnist", "--engine=jax", "train.steps=2", "log.name=both", "log.every=1"]
    settings += ["data.validation_samples=17", "train.batch=16"]
    environ = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}  # compiles sooner
    environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(unused_port), "WORLD_SIZE": "2"}
    environ |= {"LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "fullshard", "train", *settings],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "over 2 CPU devices of 2 processes" in outputs[0][0]
    said = [line for line in outputs[1][0].splitlines() if "[Gloo]" not in line]
    assert not said  # the first process speaks for both
    folder = tmp_path / "runs" / "both"
    assert [path.name for path in folder.parent.iterdir()] == ["both"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train"] * 2 + ["validation"]
    plain = torch_setup.build_model(resolve(model="mnist")).module
    plain.load_state_dict(load_file(folder / "model.safetensors"))
