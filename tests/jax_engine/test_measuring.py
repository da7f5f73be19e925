# SPDX-License-Identifier: Apache-2.0
"""A pytree with its step as the planner knows models."""

import jax
import jax.numpy as jnp
import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Precision
from fullshard.jax.measuring import record_step
from fullshard.plan.cluster.read import cluster_of, named_device
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.measured.recording import StepRecording
from fullshard.plan.predict import predict
from fullshard.plan.run import Run, Wrap

WIDTH, BATCH = 64, 256


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


PARAMS = {
    "layers": [{"kernel": shape(WIDTH, WIDTH)} for _ in range(3)],
    "scale": shape(),
    "table": shape(7, dtype=jnp.int32),
}


def loss(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"])
    return (x * params["scale"]).sum() + params["table"].sum()


@pytest.fixture(scope="module")
def recording():
    return record_step(loss, PARAMS, shape(BATCH, WIDTH))


def test_parameters_are_named_by_their_paths(recording):
    assert [(each.name, each.shape, each.trainable) for each in recording.params] == [
        *((f"layers.{n}.kernel", (WIDTH, WIDTH), True) for n in range(3)),
        ("scale", (), True),
        ("table", (7,), False),
    ]


def test_work_and_memory_are_those_of_the_compiled_step(recording):
    products = 2 * 3 * 3 * BATCH * WIDTH * WIDTH  # forward, and two in backward, of three layers
    first_input = 2 * BATCH * WIDTH * WIDTH  # which needs no gradient
    assert recording.flops == pytest.approx(products - first_input, rel=0.1)
    kept = BATCH * WIDTH * 4
    assert 2 * kept <= recording.peak_bytes <= 8 * kept
    larger = record_step(loss, PARAMS, shape(2 * BATCH, WIDTH))
    assert larger.peak_bytes == pytest.approx(2 * recording.peak_bytes, rel=0.1)


def test_it_is_planned(recording, tmp_path):
    recording.save(tmp_path / "step.json")
    assert StepRecording.load(tmp_path / "step.json") == recording
    model = MeasuredModel.of("tree", recording, [])
    run, cluster = Run(wrap=Wrap.NONE, precision=Precision()), cluster_of(named_device("h100"), 8)
    found = predict(model, run, cluster)
    assert found.memory.peak["activations"] == recording.peak_bytes
    weights = 3 * WIDTH * WIDTH * 4
    assert found.memory.resting.optimizer_bytes == pytest.approx(2 * weights / 8, rel=0.05)
    assert found.step_s > 0


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigurationError, match="no shape and dtype"):
        record_step(loss, {"layers": "none"}, shape(1, 1))
    with pytest.raises(ConfigurationError, match="nothing to train"):
        record_step(lambda p: p["a"].sum(), {"a": shape(3, dtype=jnp.int32)})
