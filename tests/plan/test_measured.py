# SPDX-License-Identifier: Apache-2.0
"""Any module as the planner knows models, and recordings as files."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import GPT as TinyGPT
from support.models import Nested
from torch import nn

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.core.presets import Transformer
from fullshard.core.strategy import Precision
from fullshard.plan import SearchSpace
from fullshard.plan.cluster.devices import cluster_of, named_device
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.measured.recording import MarkKind, StepRecording
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import Norm, shape_of
from fullshard.plan.predict import predict
from fullshard.plan.run import Loss, Recompute, Run
from fullshard.testing import LocalWorld
from fullshard.torch import fully_shard
from fullshard.torch.measuring import measure, plan_module, record_step, repeated_modules
from fullshard.train.torch.models import GPT

TOKENS = torch.zeros(1, 6, dtype=torch.long)
IN_FULL = Run(precision=Precision())


@pytest.fixture(scope="module")
def tiny():
    with torch.device("meta"):
        return measure(TinyGPT(blocks=3), [TOKENS])


def test_blocks_are_found(tiny):
    assert tiny.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert repeated_modules(nn.Linear(2, 2)) == ()


@pytest.mark.long
def test_each_way_to_run_is_recorded(tiny):
    one, two = (tiny.record(replace(IN_FULL, micro_batch=n)) for n in (1, 2))
    assert tiny.record(replace(IN_FULL, micro_batch=2)) is two
    assert 1.8 < two.peak_bytes / one.peak_bytes < 2.0  # gradients of parameters do not grow
    halves = tiny.record(Run(precision=Precision(compute="bfloat16")))
    assert halves.compute_dtype == "bfloat16"
    assert 0.4 < halves.peak_bytes / one.peak_bytes < 0.6
    again = tiny.record(replace(IN_FULL, recompute=Recompute.FULL))
    assert again.flops > one.flops
    name = "blocks.1.mlp"
    forwards = [sum(call.module == name for call in each.calls) for each in (one, again)]
    assert forwards == [1, 2]
    in_part = tiny.record(replace(IN_FULL, recompute=Recompute.SELECTIVE))
    assert one.flops < in_part.flops < again.flops
    assert again.peak_bytes < in_part.peak_bytes < one.peak_bytes


def test_any_module_is_planned_by_one_call():
    with torch.device("meta"):
        model = GPT(Transformer(2, 64, 2, 2, 128, 100, context=32))
    cluster = cluster_of(named_device("h100"), 8)
    space = SearchSpace(Run(micro_batch=2), frozenset({"strategy"}))
    batch = [torch.zeros(2, 32, dtype=torch.long)]
    choice = plan_module(model, batch, cluster, loss=lambda out: out.sum(), space=space)
    assert choice.best.run.micro_batch == 2
    assert choice.best.fits


@pytest.mark.long
@pytest.mark.parametrize("recompute", list(Recompute))
def test_a_preset_needs_what_its_model_was_measured_to_need(recompute):
    """Told by its shape alone: model state is equal, the peak close."""
    shape = Transformer(3, 256, 4, 2, 896, 1000, context=512)
    with torch.device("meta"):
        model = GPT(shape)
    tokens = torch.zeros(1, 512, dtype=torch.long)

    def loss(logits):
        targets = torch.zeros(logits.shape[0] * 512, dtype=torch.long)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets)

    # PyTorch's norm in single kernels comes back from float32 last.
    told = replace(shape_of(shape), norm=Norm.WIDE_RMS)
    measured, preset = measure(model, [tokens], loss=loss), Decoder("preset", told)
    run = Run(micro_batch=2, sequence=512, fused_norms=False, recompute=recompute, loss=Loss.FREED)
    cluster = cluster_of(named_device("h100"), 8)
    assert measured.spec(run).params == preset.spec(run).params
    found, foreseen = predict(measured, run, cluster), predict(preset, run, cluster)
    buffers = measured.record(run).buffers_bytes  # of rotary positions
    assert found.memory.peak["parameters"] == foreseen.memory.peak["parameters"] + buffers
    assert found.memory.peak["optimizer"] == foreseen.memory.peak["optimizer"]
    assert foreseen.memory.allocated_bytes == pytest.approx(found.memory.allocated_bytes, rel=0.04)
    assert preset.model_flops(run) == pytest.approx(measured.record(run).flops / 2, rel=0.35)


def test_ties_and_nesting_are_recorded():
    recording = record_step(TinyGPT(tied=True), [TOKENS])
    assert recording.params[0].aliases == ("head.weight",)
    gradients = [n for kind, n in recording if kind is MarkKind.GRADIENT]
    assert sorted(gradients) == list(range(len(recording.params)))
    nested = record_step(Nested(), [torch.ones(2, 4)])
    assert {"outer1.inner.deep", "outer2", ""} <= {call.module for call in nested.calls}


def test_the_model_is_as_before():
    model = TinyGPT()
    before = dict(model.named_parameters())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    record_step(model, [TOKENS])
    assert all(dict(model.named_parameters())[name] is param for name, param in before.items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert all(param.grad is None for param in model.parameters())


def test_a_recording_is_a_file(tmp_path):
    recording = record_step(TinyGPT(), [TOKENS])
    recording.save(tmp_path / "step.json")
    assert StepRecording.load(tmp_path / "step.json") == recording
    written = json.loads((tmp_path / "step.json").read_text("utf-8"))
    for spoilt in (
        {**written, "marks": [["allocate", 10**6]]},
        {**written, "marks": [["explode", 0]]},
        {key: value for key, value in written.items() if key != "calls"},
        {**written, "inputs": [[0, 5]]},
        [],
    ):
        (tmp_path / "spoilt.json").write_text(json.dumps(spoilt), "utf-8")
        with pytest.raises(ConfigurationError, match="no recording"):
            StepRecording.load(tmp_path / "spoilt.json")


def test_what_cannot_be_recorded_is_told():
    with pytest.raises(ConfigurationError, match="no module 'layers'"):
        measure(TinyGPT(), [TOKENS], blocks=["layers"])
    with pytest.raises(ConfigurationError, match="did you mean 'blocks"):
        MeasuredModel.of("gpt", record_step(TinyGPT(), [TOKENS]), ["block.0"])
    with pytest.raises(ConfigurationError, match="needs a gradient"):
        record_step(nn.Tanh(), [torch.ones(2)])

    class Deciding(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(NotSupportedError, match="decides by values"):
        record_step(Deciding(2, 2), [torch.ones(1, 2)])

    class Selecting(nn.Linear):
        def forward(self, x):
            return super().forward(x[torch.where(x.sum(-1) > 0)[0]])

    with pytest.raises(NotSupportedError, match="decides by values"):
        record_step(Selecting(2, 2), [torch.ones(1, 2)])
    with pytest.raises(ConfigurationError, match="call it once"):
        record_step(nn.LazyLinear(2), [torch.ones(1, 2)])

    def sharded(comm):
        with pytest.raises(UsageError, match="sharded already"):
            record_step(fully_shard(nn.Linear(4, 4), mesh=comm), [torch.ones(1, 4)])

    LocalWorld(1).run(sharded)
