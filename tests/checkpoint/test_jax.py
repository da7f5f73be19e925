# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of pytrees on JAX, on any number of devices, and across to torch and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.checkpoint import open_checkpoint
from fullshard.core.errors import CheckpointError
from fullshard.core.presets import Transformer
from fullshard.jax import (
    StoredAs,
    load_checkpoint,
    save_checkpoint,
    torch_layout,
    torch_names,
)
from fullshard.torch import load_checkpoint as torch_load
from fullshard.torch import save_checkpoint as torch_save
from fullshard.train.jax import models as jax_models
from fullshard.train.torch import models as torch_models


def mesh(count, *shape):
    devices = np.array(jax.devices()[:count]).reshape(shape or (count,))
    return Mesh(devices, ("a", "b")[: devices.ndim])


def place(value, where, *axes):
    return jax.device_put(value, NamedSharding(where, PartitionSpec(*axes)))


def state_on(where, seed=0):
    draw = np.random.default_rng(seed)
    axis = where.axis_names[-1]
    return {
        "rows": place(draw.random((16, 6), np.float32), where, axis),
        "columns": place(jnp.asarray(draw.random((3, 8)), jnp.bfloat16), where, None, axis),
        "whole": place(draw.integers(0, 9, (5,)), where),
        "list": [jnp.float32(2.5), np.arange(3), 7],
        "key": jax.random.key(seed),
        "empty": place(np.zeros((0, 4), np.float32), where),
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert type(x) is type(y)
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_number_of_devices_reads_any_other(tmp_path, asynchronous):
    for a in (2, 4, 8):
        run = tmp_path / str(a)
        state = state_on(mesh(a))
        save_checkpoint(run, state, step=3, extra={"x": 1}, asynchronous=asynchronous).wait()
        for b in (2, 4, 8):
            loaded = load_checkpoint(run, state_on(mesh(b), seed=1))
            assert (loaded.step, loaded.extra) == (3, {"x": 1})
            assert_same(loaded.state, state)
            assert loaded.state["rows"].sharding.num_devices == b
    manifest = open_checkpoint(tmp_path / "8").manifest
    assert len(manifest.tensors["state/rows"].boxes) == 8
    assert len(manifest.tensors["state/whole"].boxes) == 1  # replicas once
    assert all(each.tiling is not None for each in manifest.tensors.values() if each.size_bytes)


def test_two_axes_turned_and_shapes_without_values(tmp_path):
    where = mesh(8, 2, 4)
    values = np.random.default_rng(0).random((6, 12), np.float32)
    names = {"w": StoredAs("model/w", axes=(1, 0))}
    save_checkpoint(tmp_path, {"w": place(values, where, "a", "b")}, step=1, names=names)
    assert np.array_equal(open_checkpoint(tmp_path).read("model/w"), values.T)
    sharding = NamedSharding(mesh(4), PartitionSpec(None, "a"))
    like = jax.ShapeDtypeStruct((6, 12), jnp.float32, sharding=sharding)
    loaded = load_checkpoint(tmp_path, {"w": like}, names=names).state["w"]
    assert np.array_equal(np.asarray(loaded), values)


def test_numbers_are_not_lost_in_silence(tmp_path):
    stored = {"w": np.array([1.0, 1e300]), "n": np.array([1, 300])}
    save_checkpoint(tmp_path, stored, step=1)
    like = {"w": np.zeros(2), "n": np.zeros(2, np.int64)}
    for name, dtype, why in (
        ("w", np.float32, "1 numbers of 'state/w' are F64 in it and out of the range of F32"),
        ("w", np.int64, "'state/w' is F64 in it and I64 here, and fractions to whole numbers"),
        ("n", np.uint8, "1 numbers of 'state/n' are I64 in it and out of the range of U8"),
    ):
        other = {**like, name: np.zeros(2, dtype)}
        with pytest.raises(CheckpointError, match=why):
            load_checkpoint(tmp_path, other)
    with np.errstate(over="ignore"):
        loaded = load_checkpoint(tmp_path, {**like, "w": np.zeros(2, np.float32)}, strict=False)
    assert np.isinf(loaded.state["w"][1])
    assert load_checkpoint(tmp_path / "none", like, if_any=True) is None


def test_damage_and_what_does_not_fit(tmp_path):
    state = {"w": place(np.arange(32.0, dtype=np.float32), mesh(4), "a")}
    folder = save_checkpoint(tmp_path, state, step=1).wait()
    with pytest.raises(CheckpointError, match="lacks state/v"):
        load_checkpoint(tmp_path, {"v": state["w"]})
    with pytest.raises(CheckpointError, match=r"has shape \(32,\) in it, w wants \(16,\)"):
        load_checkpoint(tmp_path, {"w": place(np.zeros(16, np.float32), mesh(4), "a")})
    assert load_checkpoint(tmp_path, {"v": state["w"]}, strict=False).state["v"] is state["w"]
    deep = {"params": {**state, "b": np.zeros(2)}, "optimizer": {"w": np.ones(1)}}
    save_checkpoint(tmp_path / "deep", deep, step=1)
    with pytest.raises(CheckpointError, match=r"it also has state/params\.b \(1 in all\)"):
        load_checkpoint(tmp_path / "deep", {"params": state})
    left = load_checkpoint(tmp_path / "deep", {"params": state}, strict=False)
    assert left.unexpected == ("state/params.b",)
    assert load_checkpoint(tmp_path / "deep", {"params": deep["params"]}).unexpected == ()
    with pytest.raises(CheckpointError, match=r"it also has state/optimizer\.w \(1 in all\)"):
        load_checkpoint(tmp_path / "deep", {**deep, "optimizer": (optax.EmptyState(),)})
    path = folder / "00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        load_checkpoint(tmp_path, state)
    with pytest.raises(CheckpointError, match="no complete"):
        load_checkpoint(tmp_path / "none", state)


# -- across to torch -----------------------------------------------------------------------------

SHAPE = Transformer(layers=1, width=16, heads=4, kv_heads=2, hidden=24, vocab=32, context=8)
RATE, DECAY = 1e-2, 0.1


def batches():
    draw = np.random.default_rng(5)
    return [draw.integers(0, SHAPE.vocab, (4, 9)) for _ in range(6)]


def group_of(name, shape):
    return 0 if len(shape) >= 2 else 1


class OnTorch:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = torch_models.GPT(SHAPE, 8)
        params = list(self.model.parameters())
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)

    def step(self, tokens):
        tokens = torch.from_numpy(tokens)
        logits = self.model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, run, step):
        torch_save(run, self.model, self.optimizer, step=step)

    def load(self, run):
        return torch_load(run, self.model, self.optimizer).step


def matrices(tree):
    return jax.tree.map(lambda param: param.ndim >= 2, tree)


class OnJax:
    def __init__(self, seed):
        self.module = jax_models.NnxGPT(SHAPE, rngs=nnx.Rngs(seed))
        self.graph, params, rest = nnx.split(self.module, nnx.Param, ...)
        self.rest = rest
        self.like = params
        self.tx = optax.chain(
            optax.scale_by_adam(0.9, 0.999, 1e-8),
            optax.add_decayed_weights(
                DECAY, lambda tree: jax.tree.map(lambda p: p.ndim >= 2, tree)
            ),
            optax.scale(-RATE),
        )
        where = mesh(8)
        pure = nnx.to_pure_dict(params)
        pure = jax.tree.map(lambda x: place(x, where, "a" if x.shape[0] % 8 == 0 else None), pure)
        self.state = {"params": pure, "optimizer": self.tx.init(pure), "step": jnp.int32(0)}
        self.names, self.about = torch_layout(self.state, torch_names(self.module), group_of)

        def loss_of(pure, tokens):
            params = self.like
            nnx.replace_by_pure_dict(params, pure)
            logits = nnx.merge(self.graph, params, self.rest)(tokens[:, :-1])
            chosen = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return chosen.mean()

        def step(state, tokens):
            loss, grads = jax.value_and_grad(loss_of)(state["params"], tokens)
            updates, kept = self.tx.update(grads, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "optimizer": kept, "step": state["step"] + 1}, loss

        self._step = jax.jit(step)

    def step(self, tokens):
        self.state, loss = self._step(self.state, jnp.asarray(tokens))
        return float(loss)

    def save(self, run, step):
        save_checkpoint(run, self.state, step=step, names=self.names, about=self.about)

    def load(self, run):
        loaded = load_checkpoint(run, self.state, names=self.names)
        self.state = loaded.state
        assert int(self.state["step"]) == loaded.step
        return loaded.step


def test_a_gpt_goes_on_in_the_other_engine_moments_included_and_comes_back(tmp_path):
    begun, other = OnTorch(0), OnJax(1)
    for tokens in batches()[:3]:
        begun.step(tokens)
    begun.save(tmp_path, 3)
    assert other.load(tmp_path) == 3
    expected = [begun.step(tokens) for tokens in batches()[3:]]
    found = [other.step(tokens) for tokens in batches()[3:]]
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[0] != pytest.approx(expected[2], abs=1e-3)  # it learns
    again = OnTorch(2)
    other.save(tmp_path, 6)
    assert again.load(tmp_path) == 6
    for tokens in batches()[:3]:
        assert again.step(tokens) == pytest.approx(begun.step(tokens), abs=1e-4)
