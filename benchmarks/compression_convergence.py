# SPDX-License-Identifier: Apache-2.0
"""What does compressed communication cost a model: validation loss after 1,000 steps?

    python benchmarks/compression_convergence.py [--ranks 2] [--steps 1000] [--preset nano]
                                                 [--only NAME ...] [--out FILE.json]

The byte-level GPT of `fullshard train`, on its own text, from the same first weights and with the
same samples in each run; only what travels between the ranks differs. `of plain` is the loss over
that of the first row; a second seed without compression shows what chance does. Ranks are processes
of this machine.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from report import write_report
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from fullshard.core.presets import transformer
from fullshard.torch import CommunicationCompression, clip_grad_norm_, fully_shard
from fullshard.train.config import learning_rate, resolve
from fullshard.train.data import load, rank_slice
from fullshard.train.torch.models import GPT

PLAIN = "none"
SETTINGS = {
    PLAIN: None,
    "gather int8, reduce int8": CommunicationCompression("int8", "int8"),
    "the same with feedback": CommunicationCompression("int8", "int8", error_feedback=True),
    "gather bf16, reduce bf16": CommunicationCompression("bf16", "bf16"),
    "gather fp8, reduce int8": CommunicationCompression("fp8", "int8"),
    "gather int8, reduce bf16": CommunicationCompression("int8", "bf16"),
    "none, another seed": None,
}


def sharded_model(config, compression):
    torch.manual_seed(config.train.seed)
    model = GPT(transformer(config.model.preset), config.context)
    for block in model.blocks:
        fully_shard(block, compression=compression)
    return fully_shard(model, compression=compression)


def loss_of(model, batch, reduction="mean"):
    inputs, targets = (torch.as_tensor(part) for part in batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def train(config, data, compression):
    """Validation loss, and the mean loss of the last 50 steps' training samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded_model(config, compression)
    optim = config.optim
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=optim.weight_decay, fused=True)
    latest = []
    for step in range(config.train.steps):
        numbers = rank_slice(step, config.train.batch, rank, ranks)
        loss = loss_of(model, data.train_batch(config.train.seed, numbers))
        loss.backward()
        clip_grad_norm_(model.parameters(), optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(optim, config.train.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        latest = [*latest[-49:], loss.detach()]
    return validation_loss(model, data), mean_of_ranks(torch.stack(latest).mean())


@torch.no_grad()
def validation_loss(model, data):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = data.validation_count // ranks * ranks
    total = torch.zeros(())
    for position in range(rank, count, ranks):
        total += loss_of(model, data.validation_batch([position]))
    return mean_of_ranks(total / (count // ranks))


def mean_of_ranks(value):
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def rank_main(rank, rendezvous, options):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.ranks
    )
    rows = []
    for name in [name for name in SETTINGS if name in (PLAIN, *options.only)]:
        seed = 1 if "seed" in name else 0
        chosen = {"steps": options.steps, "seed": seed, "batch": options.batch}
        overrides = [f"train.{key}={value}" for key, value in chosen.items()]
        config = resolve(overrides=[f"model.preset={options.preset}", *overrides])
        validation, training = train(config, load(config), SETTINGS[name])
        rows.append(
            {
                "compression": name,
                "ranks": options.ranks,
                "steps": options.steps,
                "preset": options.preset,
                "validation_loss": validation,
                "of_plain": validation / rows[0]["validation_loss"] if rows else 1.0,
                "training_loss": training,
            }
        )
        if rank == 0:
            print(f"{name}: {validation:.4f}", flush=True)
            write_report(options.out, rows)
    if rank == 0:
        print_table(rows)
    dist.destroy_process_group()


def print_table(rows):
    keys = ("validation_loss", "of_plain", "training_loss")
    table = Table("compression", *(key.replace("_", " ") for key in keys))
    for row in rows:
        table.add_row(row["compression"], *(f"{row[key]:.4f}" for key in keys))
    Console(width=100).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/rendezvous", options)
        torch.multiprocessing.spawn(rank_main, arguments, options.ranks)


if __name__ == "__main__":
    main()
