# SPDX-License-Identifier: Apache-2.0
"""Blocks are told to keep and to move what programs of theirs do, measured on a CPU."""

import re
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import nop
from support.live_bytes import LiveBytes
from support.llama_block import HEAD, HEADS, HIDDEN, KV_HEADS, TOKENS, WIDTH, Block, saved_bytes
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fullshard.core.strategy import Precision
from fullshard.plan import (
    Engine,
    ExpertKernel,
    Loss,
    Recompute,
    Run,
    cluster_of,
    named_device,
    named_model,
    predict,
)
from fullshard.plan.memory.activations import Activations
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import NAMINGS, Experts, Shape
from fullshard.plan.step.script import Act, Pass, write_script

COUNT, ACTIVE = 4, 2
MODEL = Decoder(
    "tiny",
    Shape(
        2,
        WIDTH,
        HEADS,
        KV_HEADS,
        HEAD,
        HIDDEN,
        256,
        TOKENS,
        rotary=False,
        naming=NAMINGS["LLAMA"],
        experts=Experts(COUNT, ACTIVE, HIDDEN),
    ),
)
PLAIN = Run(precision=Precision(), fused_norms=False, experts=ExpertKernel.PADDED)
H100 = cluster_of(named_device("h100"), 1)


def operations(run, *names):
    return [each for each in MODEL.calls(run)[1].operations if each.name in names]


def padded(rows, lengths):
    """``rows`` in order of experts, each expert's padded to the length of the longest."""
    out = rows.new_zeros(len(lengths), max(lengths), rows.shape[1])
    for number, part in enumerate(rows.split(lengths)):
        out[number, : len(part)] = rows[sum(lengths[:number]) : sum(lengths[: number + 1])]
    return out


def unpadded(wide, rows, lengths):
    out = torch.zeros_like(rows)
    for number, length in enumerate(lengths):
        start = sum(lengths[:number])
        out[start : start + length] = wide[number, :length]
    return out


@pytest.mark.parametrize("lengths", [[64, 64, 64, 64], [128, 128, 0, 0]])
def test_padded_experts_keep_as_many_rows_as_the_fullest_has(lengths):
    gate, up, down = (
        torch.randn(COUNT, *shape, requires_grad=True)
        for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    rows = torch.randn(TOKENS * ACTIVE, WIDTH, requires_grad=True)
    shares = torch.rand(TOKENS * ACTIVE, 1, requires_grad=True)

    def forward():
        wide = padded(rows, lengths)
        out = (F.silu(wide @ gate) * (wide @ up)) @ down
        return unpadded(out, rows, lengths) * shares

    run = replace(PLAIN, imbalance=max(lengths) * COUNT / len(rows))
    told = operations(run, "padding", "experts up", "activation", "experts down", "unpadding")
    kept = saved_bytes(forward, (gate, up, down, shares))
    assert sum(each.saved_bytes for each in told) == kept


def test_slices_written_in_place_clone_the_whole_gradient():
    lengths = [128, 128, 0, 0]
    rows = torch.randn(TOKENS * ACTIVE, WIDTH, requires_grad=True)
    out = unpadded(padded(rows, lengths) * 1.0, rows, lengths)
    gradient, moved = torch.ones_like(out), MovedBytes()
    with moved:
        out.backward(gradient)
    told = operations(PLAIN, "padding", "unpadding")
    product = 3 * 4 * COUNT * TOKENS * WIDTH
    assert sum(each.backward.bytes for each in told) == pytest.approx(
        moved.bytes - product, rel=0.25
    )


def test_values_that_are_a_view_keep_all_of_a_joint_product():
    joint = torch.nn.Linear(WIDTH, 3 * WIDTH)
    normed, turn = torch.randn(1, TOKENS, WIDTH), torch.rand(TOKENS, HEAD)

    def forward():
        both = joint(normed).view(1, TOKENS, HEADS, 3 * HEAD).transpose(1, 2)
        query, key, value = both.chunk(3, dim=-1)
        F.scaled_dot_product_attention(query * turn, key * turn, value, is_causal=True)

    shape = replace(MODEL.shape, kv_heads=HEADS, rotary=True, experts=None, naming=NAMINGS["NEOX"])
    run = Run(precision=Precision())
    told = Decoder("neox", shape).calls(run)[1].operations
    names = ("query, key, value", "rotary", "attention")
    kept = saved_bytes(forward, (*joint.parameters(), normed, turn))
    assert sum(each.saved_bytes for each in told if each.name in names) == kept


def test_one_graph_gives_its_gradients_when_its_backward_has_ended():
    happened = []

    def backward(graph, inputs):
        def run(arguments):
            out = graph.forward(*arguments)
            happened.append("the backward of all")
            return out

        run._boxed_call = True
        return run

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: happened.append("a gradient"))
    backend = aot_autograd(fw_compiler=nop, bw_compiler=backward)
    torch.compile(model, backend=backend)(torch.ones(2, 8)).sum().backward()
    assert happened == ["the backward of all", *["a gradient"] * 4]


@pytest.mark.parametrize(("devices", "whole"), [(1, True), (8, False)])
def test_gradients_of_one_graph_are_held_beside_those_that_wait(devices, whole):
    model, cluster = named_model("llama3-8b"), cluster_of(named_device("h200"), devices)
    run = Run(
        engine=Engine.FSDP2,
        param_dtype="bfloat16",
        precision=Precision(),
        recompute=Recompute.FULL,
        loss=Loss.NATIVE,
        accumulate=4,
    )
    eager, compiled = (
        predict(model, replace(run, compiled=each), cluster).memory for each in (False, True)
    )
    assert (compiled.cause.startswith("backward of blocks.0")) is whole
    all_gradients = 2 * model.spec(run).numel
    if whole:
        logits = 2 * 8192 * 128_256  # kept by the caller, and as many of their gradient
        assert compiled.peak["unit buffers"] == pytest.approx(all_gradients, rel=0.01)
        assert compiled.peak["logits and loss"] == 2 * logits
    else:
        assert compiled.allocated_bytes <= eager.allocated_bytes


def test_a_table_of_tokens_is_whole_on_each_of_the_devices_that_share_layers():
    model = named_model("llama3-8b")
    run = Run(tensor_parallel=4)
    cut = model.spec(replace(run, cut_embedding=True)).numel
    assert model.spec(run).numel - cut == 128_256 * 4096 * 3 // 4


def test_an_untrained_router_sends_most_tokens_to_the_same_experts():
    torch.manual_seed(0)
    words = re.findall(r"\w+", topics["class"])[:TOKENS]
    table = {word: 0.02 * torch.randn(WIDTH) for word in words}
    hidden = torch.stack([table[word] for word in words]).unsqueeze(0)
    shares = []
    for _ in range(6):
        block, router = Block(), torch.nn.Linear(WIDTH, 8, bias=False)
        for matrix in (each for each in block.parameters() if each.dim() == 2):
            torch.nn.init.normal_(matrix, std=0.02)  # as Llama's begin
        hidden = block(hidden).detach()
        chosen = router(block.second(hidden)).topk(2).indices
        shares.append(chosen.flatten().bincount().max().item() / TOKENS)
    assert len(words) == TOKENS
    assert sum(shares) / 6 > 2 * 2 / 8


def test_untold_padded_experts_are_as_uneven_as_can_be():
    model, cluster = named_model("mixtral-8x7b"), cluster_of(named_device("h100"), 64)
    run = Run(recompute=Recompute.FULL, loss=Loss.CHUNKED, experts=ExpertKernel.PADDED)
    even, untold, most = (
        predict(model, replace(run, imbalance=told), cluster) for told in (1.0, None, 4.0)
    )
    assert even.memory.allocated_bytes < untold.memory.allocated_bytes
    assert untold.memory.peak == most.memory.peak
    assert untold.step_s == most.step_s > 1.5 * even.step_s
    assert (
        untold.interval.high_s / untold.interval.low_s > most.interval.high_s / most.interval.low_s
    )


def test_a_kept_router_loss_keeps_what_was_computed_before_it():
    class Routed(Block):
        """A block whose router keeps its loss."""

        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(WIDTH, COUNT, bias=False)

        def forward(self, hidden):
            hidden = self.attend(hidden)
            normed = self.second(hidden)
            self.loss = self.router(normed).softmax(-1).mean(0).square().sum()
            return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))

    block = Routed()
    left = []
    for keeps in (False, True):
        hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        live = LiveBytes(least=1)
        with live:
            out = checkpoint(block, hidden, use_reentrant=False)
            (out.sum() + block.loss).backward()
            del out
            hidden.grad = None
            block.zero_grad()
            if not keeps:
                del block.loss
        left.append(live.now)
    told = [
        _left(replace(PLAIN, recompute=Recompute.FULL, kept_router_loss=each))
        for each in (False, True)
    ]
    assert told[0] == 0
    assert told[1] == pytest.approx(left[1] - left[0], rel=0.1)


def _left(run):
    """Bytes that are held when the first block's backward is over, in place of its input."""
    script = write_script(MODEL, run, H100)
    activations = Activations(script, run)
    activations.carry_out(Act(Pass.FORWARD, 1, 0))
    activations.carry_out(Act(Pass.AGAIN, 1, 0))
    activations.carry_out(Act(Pass.BACKWARD, 1, 0))
    return activations.kept


class MovedBytes(TorchDispatchMode):
    """Bytes that operations read and write; views and what is only allocated move none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view and "empty" not in str(function):
            moved = [out] if "zeros" in str(function) else tree_leaves((args, out))
            self.bytes += sum(each.nbytes for each in moved if isinstance(each, torch.Tensor))
        return out
