# SPDX-License-Identifier: Apache-2.0
"""The models of the JAX engine against those of the torch engine, weight by weight."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.nn import functional as F

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import Transformer
from fullshard.jax import create_mesh, generate, make_train_step, torch_names
from fullshard.train.config import OptimConfig, learning_rate, resolve
from fullshard.train.jax import models as in_jax
from fullshard.train.jax.launch import build_model
from fullshard.train.jax.optimizer import adamw
from fullshard.train.jax.run import loss_of
from fullshard.train.torch.launch import build_model as build_torch_model
from fullshard.train.torch.models import GPT, DigitNet

SHAPE = Transformer(2, 32, 4, 2, 48, 64, context=16)
TIED = Transformer(1, 32, 4, 4, 48, 64, context=16, tied=True)
TIED_NAMES = {"output.weight": "embedding.weight"}


def with_weights_of(plain, make, tied=None):
    """The model that ``make`` makes, with the values that ``plain`` has in torch, and its names."""
    graph, state = nnx.split(nnx.eval_shape(make))
    names, held = torch_names(nnx.merge(graph, state), tied), plain.state_dict()
    assert {n for each in names.values() for n in (each.name, *each.aliases)} == set(held)
    values = []
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.RngKey):
            value = jax.random.key(0)
        elif isinstance(variable, nnx.RngCount):
            value = jnp.zeros((), jnp.uint32)
        else:
            there = names[".".join(map(str, path))]
            value = jnp.asarray(held[there.name].numpy().transpose(np.argsort(there.axes)))
        assert value.shape == variable.shape
        values.append((path, variable.replace(value)))
    return nnx.merge(graph, nnx.from_flat_state(values)), names


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(0, 64, shape)


def relative(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("shape", "tied"), [(SHAPE, {}), (TIED, TIED_NAMES)])
def test_the_gpt_has_torchs_logits_and_gradients(shape, tied):
    plain = GPT(shape)
    model, names = with_weights_of(plain, lambda: in_jax.NnxGPT(shape, rngs=nnx.Rngs(0)), tied)
    inputs, targets = tokens(1, 3, 16), tokens(2, 3, 16)
    expected_logits = plain(torch.from_numpy(inputs))
    F.cross_entropy(expected_logits.flatten(0, 1), torch.from_numpy(targets).flatten()).backward()
    expected = {name: param.grad.numpy() for name, param in plain.named_parameters()}

    @nnx.jit
    def both(model, batch):
        return model(batch[0]), nnx.grad(loss_of)(model, batch)

    logits, gradients = both(model, (inputs, targets))
    assert relative(np.asarray(logits), expected_logits.detach().numpy()) < 1e-5
    found = {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(gradients)}
    assert found.keys() == names.keys()
    for path, gradient in found.items():
        there = names[path]
        assert relative(gradient.transpose(there.axes), expected[there.name]) < 1e-5


def test_the_digit_net_has_torchs_output_without_dropout():
    plain = DigitNet().eval()

    def make():
        return nnx.view(in_jax.NnxDigitNet(rngs=nnx.Rngs(0)), deterministic=True)

    model, names = with_weights_of(plain, make)
    images = np.random.default_rng(0).normal(size=(3, 1, 28, 28)).astype(np.float32)
    found = np.asarray(nnx.jit(lambda model, images: model(images))(model, images))
    assert relative(found, plain(torch.from_numpy(images)).detach().numpy()) < 1e-5
    assert names["conv2.kernel"].axes == (3, 2, 0, 1)


@pytest.mark.parametrize("name", ["gpt", "mnist"])
def test_values_begin_as_widely_spread_as_torchs(name):
    config = resolve(model=name)
    torch.manual_seed(0)
    held = build_torch_model(config).state_dict()
    make, names = build_model(config)
    state = jax.jit(lambda: nnx.state(make(), nnx.Param))()
    assert len(nnx.to_flat_state(state)) == len(names) == len(held)
    for path, value in nnx.to_flat_state(state):
        expected = held[names[".".join(map(str, path))].name].numpy()
        if expected.size >= 250:
            assert np.asarray(value).std() == pytest.approx(expected.std(), rel=0.1)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_adamw_moves_as_torchs_does(clip_norm):
    optim = OptimConfig(lr=0.1, warmup_steps=2, clip_norm=clip_norm, weight_decay=0.3)
    random, steps = np.random.default_rng(0), 6
    start = {"kernel": random.normal(size=(4, 3)), "scale": random.normal(size=3)}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in start.items()}
    plain = {name: torch.tensor(value, dtype=torch.float32) for name, value in start.items()}
    groups = [
        {"params": [plain["kernel"]], "weight_decay": optim.weight_decay},
        {"params": [plain["scale"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2))
    optimizer = adamw(optim, steps)
    state = optimizer.init(params)
    for step in range(steps):
        grads = {name: random.normal(size=value.shape) for name, value in start.items()}
        for name, value in grads.items():
            plain[name].grad = torch.tensor(value, dtype=torch.float32)
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), clip_norm or torch.inf)
        for group in reference.param_groups:
            group["lr"] = learning_rate(optim, steps, step)
        reference.step()
        grads = {name: jnp.asarray(value, jnp.float32) for name, value in grads.items()}
        updates, state = optimizer.update(grads, state, params, value=1.0)
        params = jax.tree.map(jnp.add, params, updates)
        assert float(state.grad_norm) == pytest.approx(norm.item(), rel=1e-6)
        for name, value in params.items():
            assert relative(np.asarray(value), plain[name].numpy()) < 1e-6


@pytest.mark.parametrize(("gradient", "loss"), [(jnp.nan, 1.0), (jnp.inf, 1.0), (1.0, jnp.nan)])
def test_what_is_not_finite_changes_nothing_but_the_count(gradient, loss):
    optimizer = adamw(OptimConfig(), 3)
    params = {"kernel": jnp.ones((2, 2))}
    start = optimizer.init(params)
    _, before = optimizer.update({"kernel": jnp.ones((2, 2))}, start, params, value=1.0)
    bad = {"kernel": jnp.array([[1.0, gradient], [1.0, 1.0]])}
    updates, after = optimizer.update(bad, before, params, value=loss)
    assert not np.asarray(updates["kernel"]).any()
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), after.inner, before.inner))
    assert int(after.step) == int(before.step) + 1


def test_decoding_one_by_one_gives_the_logits_of_the_whole():
    model = in_jax.NnxGPT(TIED, rngs=nnx.Rngs(0))
    inputs = jnp.asarray(tokens(1, 2, 16))
    expected = np.asarray(nnx.jit(lambda model, x: model(x))(model, inputs))
    decode = nnx.jit(lambda model, x, cache, at: model.decode(x, cache, at))
    cache = model.cache(2, 16)
    for position in range(16):
        logits, cache = decode(model, inputs[:, position], cache, jnp.int32(position))
        assert relative(np.asarray(logits), expected[:, position]) < 1e-5


def test_generation_without_chance_takes_the_likeliest():
    shape = SHAPE

    def make():
        return in_jax.NnxGPT(shape, rngs=nnx.Rngs(3))

    step = make_train_step(make, optax.sgd(0.1), loss_of, create_mesh(fsdp=4))
    state = step.init()
    prompt = tokens(5, 2, 4)
    found = generate(step, state, prompt, 5, temperature=0.0)
    model, text = make(), jnp.asarray(prompt)
    forward = nnx.jit(lambda model, x: model(x))
    for _ in range(5):
        padded = jnp.pad(text, [(0, 0), (0, 9 - text.shape[1])])
        logits = forward(model, padded)[:, text.shape[1] - 1]
        text = jnp.concatenate([text, logits.argmax(-1)[:, None]], axis=1)
    np.testing.assert_array_equal(found, text[:, 4:])
    drawn = generate(step, state, prompt, 5, temperature=5.0, seed=1)
    assert (drawn != found).any()
    assert drawn.shape == (2, 5)
    with pytest.raises(ConfigurationError, match=r"prompt of shape \(rows, length\)"):
        generate(step, state, prompt[0], 5)
