# SPDX-License-Identifier: Apache-2.0
"""Weights in and out as safetensors files, between devices and between frameworks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import torch
from flax import nnx
from safetensors.numpy import save_file
from support import jax_models as models

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.presets import Transformer
from fullshard.jax import (
    StoredAs,
    create_mesh,
    load_weights,
    make_train_step,
    save_weights,
    torch_names,
)
from fullshard.train.jax import models as in_jax
from fullshard.train.torch import models as in_torch


def never(model, batch):
    raise AssertionError("nothing is trained here")


def step_of(model, devices, **options):
    return make_train_step(model, optax.sgd(0.1), never, create_mesh(fsdp=devices), **options)


def values(state):
    return models.held(state.params) | models.held(state.other)


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert value.tobytes() == expected[name].tobytes(), name


def test_a_torch_gpt_goes_through_the_jax_gpt_bit_for_bit(tmp_path):
    shape = Transformer(2, 16, 4, 2, 20, 30, context=8, tied=True)
    plain = in_torch.GPT(shape)
    held = {name: value.clone() for name, value in plain.state_dict().items()}
    safetensors.torch.save_file(held, tmp_path / "torch.safetensors")

    def make():
        return in_jax.NnxGPT(shape, rngs=nnx.Rngs(0))

    names = torch_names(nnx.eval_shape(make), {"output.weight": "embedding.weight"})
    step = step_of(make, 3)
    state = load_weights(tmp_path / "torch.safetensors", step.init(), names)
    whole = values(state)
    query = held["blocks.1.attention.query.weight"].numpy()
    assert np.array_equal(whole["blocks.1.attention.query.kernel"], query.T)
    save_weights(tmp_path / "jax.safetensors", state, names)
    back = safetensors.torch.load_file(tmp_path / "jax.safetensors")
    plain.load_state_dict(back)  # no more names, and no fewer
    assert all(torch.equal(back[name], value) for name, value in held.items())
    assert not list(tmp_path.glob("*.partial"))


class Normed(nnx.Module):
    """Statistics, and parameters that no number of devices divides."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 3, (3, 5), rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, param_dtype=jnp.bfloat16, rngs=rngs)
        self.factor = nnx.Param(jnp.float32(2.0))


def test_statistics_and_low_precision_travel_under_torchs_names(tmp_path):
    names = torch_names(nnx.eval_shape(Normed))
    assert names["conv.kernel"] == StoredAs("conv.weight", (3, 2, 0, 1))
    assert names["norm.mean"] == StoredAs("norm.running_mean", (0,))
    state, elsewhere = step_of(Normed, 5).init(), step_of(Normed, 2).init()
    fill = lambda x: np.arange(x.size).reshape(x.shape).astype(x.dtype)  # noqa: E731
    other = {key: x if "rngs" in key else fill(x) for key, x in state.other.items()}
    state = dataclasses.replace(state, params=jax.tree.map(fill, state.params), other=other)
    filled = {key: x for key, x in values(state).items() if "rngs" not in key}
    save_weights(tmp_path / "a.safetensors", state, names)
    there = safetensors.torch.load_file(tmp_path / "a.safetensors")
    module = torch.nn.Conv2d(2, 3, (3, 5))
    module.load_state_dict({name: there[f"conv.{name}"] for name in ("weight", "bias")})
    assert there["norm.running_var"].shape == (3,)
    assert there["out.weight"].dtype == torch.bfloat16
    assert there["factor"].shape == ()
    loaded = values(load_weights(tmp_path / "a.safetensors", elsewhere, names))
    assert_same_bits({key: loaded[key] for key in filled}, filled)


def test_without_names_all_is_there_by_its_path(tmp_path):
    tree = {"a": {"w": jnp.arange(15.0).reshape(3, 5)}, "n": jnp.arange(3)}
    one, other = step_of(tree, 4), step_of(jax.tree.map(jnp.zeros_like, tree), 3)
    state = one.init()
    save_weights(tmp_path / "a.safetensors", state)
    assert set(safetensors.torch.load_file(tmp_path / "a.safetensors")) == {"a.w", "n"}
    loaded = load_weights(tmp_path / "a.safetensors", other.init())
    assert_same_bits(values(loaded), values(state))


W = np.arange(6, dtype=np.float32).reshape(2, 3)
NAMES = {"w": StoredAs("w", (0, 1), aliases=("v",)), "b": StoredAs("b", (0,))}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"w": W}, r"the model's \['b'\] are not in it"),
        ({"w": W, "b": W[0], "c": W}, r"its \['c'\] not in the model"),
        ({"w": W.T.copy(), "b": W[0]}, r"'w' is F32 of shape \[2, 3\] in the model, F32 of .*3, 2"),
        ({"w": W, "b": W[0].astype(np.float16)}, "F16 of shape .3. in the file"),
        ({"w": W, "v": W + 1, "b": W[0]}, "'v' and 'w' are one parameter in the model, and differ"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, content, message):
    step = step_of({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, 2)
    state = step.init()
    before = values(state)
    save_file(content, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match=rf"cannot load .*a\.safetensors: .*{message}"):
        load_weights(tmp_path / "a.safetensors", state, NAMES)
    assert_same_bits(values(state), before)


def test_what_cannot_be_read_or_written_is_said(tmp_path):
    step = step_of({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, 2)
    state = step.init()
    with pytest.raises(ConfigurationError, match=r"cannot load .*none\.safetensors"):
        load_weights(tmp_path / "none.safetensors", state)
    for header, message in (
        (b"{}", "it is no safetensors file: its header has .* bytes"),
        (b'{"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', "'w' is F4 of shape"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}', "'w' has 8 bytes"),
        (b"[]", "its header is no JSON object"),
    ):
        size = len(header) + 99 * (header == b"{}")
        (tmp_path / "a").write_bytes(size.to_bytes(8, "little") + header)
        with pytest.raises(ConfigurationError, match=f"cannot load .*: .*{message}"):
            load_weights(tmp_path / "a", state)
    with pytest.raises(ConfigurationError, match="expected a TrainState, got TrainStep"):
        load_weights(tmp_path / "a", step)
    (tmp_path / "a").unlink()
    with pytest.raises(ConfigurationError, match=r"could not write the weights to .*No such file"):
        save_weights(tmp_path / "none" / "a.safetensors", state)
    with pytest.raises(ConfigurationError, match="no name is given for the parameter 'b'"):
        save_weights(tmp_path / "a.safetensors", state, {"w": NAMES["w"]})
    assert not list(tmp_path.iterdir())


def test_names_that_cannot_be_are_refused():
    def attention():
        return nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)

    with pytest.raises(NotSupportedError, match="LinearGeneral, whose arrays have other shapes"):
        torch_names(nnx.eval_shape(attention))
    linear = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigurationError, match=r"\['wight'\].*there are bias, weight"):
        torch_names(linear, {"tied": "wight"})
