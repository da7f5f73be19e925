# SPDX-License-Identifier: Apache-2.0
"""The peak of a step's memory on a CPU, from the profiler's record of the allocator."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.checkpoint import checkpoint

from fullshard.core.presets import Transformer
from fullshard.torch import fully_shard
from fullshard.train.torch.models import GPT

BEGIN, OVER = "the measured step begins", "the measured step is over"


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


class ConvNet(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class EncoderDecoder(nn.Module):
    def __init__(self, width, blocks, vocab=500):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.both = nn.Transformer(
            width, 4, blocks, blocks, 4 * width, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, source, target):
        return self.head(self.both(self.embed(source), self.embed(target)))


def token_loss(logits):
    logits = logits.flatten(0, -2).float()
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


@dataclass(frozen=True)
class Case:
    """A plain model, its inputs, and the paths of its blocks."""

    build: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    blocks: Sequence[str]

    def recomputing(self) -> nn.Module:
        """The model with its blocks recomputed in backward."""
        model = self.build()
        for path in self.blocks:
            block = model.get_submodule(path)
            block.forward = _recomputed(block.forward)
        return model


def _recomputed(forward):
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def gpt(layers, width, batch, length, vocab=512):
    shape = Transformer(layers, width, 4, 2, 3 * width, vocab, length)
    tokens = torch.zeros(batch, length, dtype=torch.long)
    return Case(lambda: GPT(shape), (tokens,), [f"blocks.{n}" for n in range(layers)])


def convolutions(width, blocks, batch, size):
    images = torch.zeros(batch, 3, size, size)
    return Case(lambda: ConvNet(width, blocks), (images,), [f"blocks.{n}" for n in range(blocks)])


def encoder_decoder(width, blocks, batch, length):
    tokens = torch.zeros(batch, length, dtype=torch.long)
    paths = [f"both.{part}.layers.{n}" for part in ("encoder", "decoder") for n in range(blocks)]
    return Case(lambda: EncoderDecoder(width, blocks), (tokens, tokens[:, : length // 2]), paths)


def measured_peak_bytes(build: Callable[[], nn.Module], case: Case, mesh) -> int:
    """Bytes held at the peak of the third step, of all that this process holds for it."""
    gc.collect()  # what is released later was not held for this model
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        # Made here: the profiler takes memory from before for what was once at its place.
        model = build()
        inputs = tuple(each.clone() for each in case.inputs)
        for path in case.blocks:
            fully_shard(model.get_submodule(path), mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            token_loss(model(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()  # what reference cycles keep alive is nobody's to hold
        with record_function(BEGIN):
            pass
        token_loss(model(*inputs)).backward()
        with record_function(OVER):
            pass
    return _peak_between_marks(profile)


def _peak_between_marks(profile) -> int:
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live, peak, inside = 0, 0, False
    for event in events:
        if event.name() == BEGIN:
            inside, peak = True, live
        elif event.name() == OVER:
            return peak
        elif event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if inside else peak
    raise AssertionError("the profiler has no record of the step's end")
