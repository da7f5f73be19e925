# SPDX-License-Identifier: Apache-2.0
"""Random models, optimizers and ways to shard, a seed each, and their training on any world."""

import random
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from support.beside import grid
from support.expert_workers import StackedMuon
from support.optimizers import FORMS, FUSED, OPTIMIZERS
from torch import nn
from torch.optim import lr_scheduler

import fullshard.torch as fs

WORLDS = (1, 2, 3, 4, 5, 8)
WIDTH, WORDS = 12, 19
SAMPLES = 240  # divides by every world and two micro-batches
DOORS = ("fully_shard", "wrapper")
ALIGNS = ("element", "row", "matrix")
MODES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")


class Dense(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Transposed(nn.Module):
    """A transposed convolution, whose weight has three dims."""

    def __init__(self):
        super().__init__()
        self.conv = nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x.mT).mT)


class Experts(nn.Module):
    """A stack of matrices, all of which see all tokens."""

    def __init__(self, count):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 4)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.einsum("bti,eij->btj", x, self.stack) * self.gain


class Lora(nn.Module):
    """Two small matrices beside a frozen one."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.mT @ self.b.mT


class Net(nn.Module):
    """A table, some blocks with norms and a head, which may be the table."""

    def __init__(self, choose):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        makers = [
            lambda: Dense(choose.choice((7, 16, 33))), Transposed, Lora,
            lambda: Experts(choose.choice((1, 3, 8))),
        ]  # fmt: skip
        self.blocks = nn.ModuleList(choose.choice(makers)() for _ in range(choose.randint(2, 4)))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in self.blocks)
        self.head = nn.Linear(WIDTH, WORDS, bias=choose.random() < 0.5)
        if choose.random() < 0.4:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, WORDS, (SAMPLES, 4), generator=generator)


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Way:
    """The way in which a model is sharded."""

    door: str
    align: str
    mode: str
    inner: int  # ranks that share slices, of hybrid ones
    offload: bool
    units: tuple[str, ...]
    together: bool  # matrices are dealt out for the whole model

    def shard(self, comm, model):
        where = grid(comm, self.inner) if self.mode == "HYBRID_SHARD" else comm
        if self.door == "wrapper":
            units = {model.get_submodule(name) for name in self.units}
            return fs.FullyShardedDataParallel(
                model, where, fs.ShardingStrategy[self.mode], fs.CPUOffload(self.offload),
                auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
                    recurse or module in units
                ),
                align=self.align, use_orig_params=True,
            )  # fmt: skip
        options = {"mesh": where, "reshard_after_forward": self.mode != "SHARD_GRAD_OP"}
        options["align"] = self.align
        if self.align == "matrix" and self.together:
            options["align"] = fs.WholeMatrices(model)
        if self.offload:
            options["offload_policy"] = fs.CPUOffloadPolicy(pin_memory=False)
        for name in self.units:
            fs.fully_shard(model.get_submodule(name), **options)
        return fs.fully_shard(model, **options)


def drawn_way(choose, world, model):
    """Draw a way to shard ``model``; NO_SHARD is of the wrapper and owns no matrices."""
    blocks = [f"blocks.{i}" for i in range(len(model.blocks)) if choose.random() < 0.7]
    door, mode = choose.choice(DOORS), choose.choice(MODES[:3] * 2 + MODES)
    return Way(
        "wrapper" if mode == "NO_SHARD" else door,
        choose.choice(ALIGNS),
        mode,
        choose.choice([n for n in range(1, world + 1) if world % n == 0]),
        choose.random() < 0.25,
        tuple(blocks),
        choose.random() < 0.5,
    )


def elementwise(choose):
    name = choose.choice(sorted(OPTIMIZERS))
    forms = [form for form in FORMS if form != "fused" or name in FUSED]
    return partial(OPTIMIZERS[name], **FORMS[choose.choice(forms)])


def whole_matrix(choose):
    """Return a class for matrices and stacks, and the number of dims that it takes."""
    return choose.choice([
        (partial(torch.optim.Muon, lr=0.02, weight_decay=0.1), (2,)),
        (partial(torch.optim.Adafactor, lr=0.01), (0, 1, 2, 3)),
        (StackedMuon, (2, 3)),
    ])  # fmt: skip


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a seed, their groups by parameters' names, and schedulers."""

    seed: int
    exchanged: bool = False

    def make(self, model):
        """Return optimizers and schedulers over ``model``, sharded or not."""
        choose = random.Random(self.seed)
        (whole, dims), others = whole_matrix(choose), elementwise(choose)
        share, schedule = choose.random(), choose.choice(["none", "step", "lambda"])
        mine, rest = ({}, {}), ({}, {})
        for name, param in model.named_parameters():
            if param.requires_grad:
                is_mine = param.dim() in dims and "embed" not in name and choose.random() < share
                groups = mine if is_mine else rest
                groups[choose.random() < 0.3][name] = param
        made = []
        for kind, groups in ((whole, mine), (others, rest)):
            chosen = [
                {"params": list(params.values()), "lr": lr}
                for params, lr in zip(groups, (0.01, 0.003), strict=True)
                if params
            ]
            if chosen:
                made.append(kind(chosen))
                if self.exchanged and kind is whole:
                    fs.exchange_matrices(made[-1])
        schedulers = [lr_scheduler.StepLR(each, 1, 0.9) for each in made if schedule == "step"]
        schedulers += [
            lr_scheduler.LambdaLR(each, lambda n: 1 / (1 + n)) for each in made
            if schedule == "lambda"
        ]  # fmt: skip
        return made, schedulers


def train(model, made, steps, rank=0, world=1, parts=1, max_norm=None, without=None):
    optimizers, schedulers = made
    share = SAMPLES // world // parts
    for step in steps:
        mine = batch(step).chunk(world)[rank]
        for part in range(parts):
            (loss_of(model, mine[part * share :][:share]) / parts).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if without is not None and step % 2:
            trained = [param for param in model.parameters() if param.requires_grad]
            trained[without % len(trained)].grad = None
        for each in (*optimizers, *schedulers):
            each.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
