# SPDX-License-Identifier: Apache-2.0
"""Measure a step of Muon over owned matrices, and over FSDP2's rows.

    sudo python benchmarks/optimizers.py [--rate-mbit 2000] [--rounds 7] [--out FILE.json]

A small transformer on two hosts, one rank and one thread on each: network namespaces of this
machine (see `netlab`). Matrices are stepped by `torch.optim.Muon` and the rest by AdamW, or all by
AdamW. Over fullshard each matrix has one owner (`WholeMatrices`). Exchanged is fullshard cut by
rows, with `exchange_matrices`. Over FSDP2 the same class steps DTensors, which gather each matrix
on all ranks as often as its operations ask for it. Alone is one
process with the whole model and one rank's examples. Seconds are medians, and `step of ours` is the
median over rounds of a step's time over that of fullshard with Muon; sent is what a host sends
in a step, and in `optimizer.step()`. Ends with status 2 where there can be no such hosts.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import netlab
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn

from fullshard.torch import WholeMatrices, exchange_matrices, fully_shard

HOSTS, WIDTH, BLOCKS, TOKENS = 2, 256, 4, 128
WARM_UP_ROUNDS = 2
MUON, ADAMW = "Muon", "AdamW"


def build():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer
    return nn.Sequential(
        *(layer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS))
    )


def owned(model):
    whole = WholeMatrices(model)
    for block in model:
        fully_shard(block, align=whole)
    return fully_shard(model)


def rows(shard):
    def make(model):
        for block in model:
            shard(block)
        return shard(model)

    return make


ENGINES = {
    ("fullshard", MUON): owned,
    ("fullshard", ADAMW): rows(fully_shard),
    ("exchanged", MUON): rows(fully_shard),
    ("FSDP2", MUON): rows(torch_fsdp.fully_shard),
    ("FSDP2", ADAMW): rows(torch_fsdp.fully_shard),
    ("alone", MUON): lambda model: model,
    ("alone", ADAMW): lambda model: model,
}


def optimizers(model, name):
    matrices = [param for param in model.parameters() if param.dim() == 2 and name == MUON]
    chosen = {id(param) for param in matrices}
    rest = torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], lr=1e-3)
    return [torch.optim.Muon(matrices, lr=1e-3), rest] if matrices else [rest]


def sent_bytes():
    return int(netlab.SENT_BYTES.read_text())


def timed_step(model, optimizers, inputs):
    """Seconds and bytes of a step and of its optimizers' part, and its loss."""
    dist.barrier()
    begin, sent = time.perf_counter(), sent_bytes()
    loss = model(inputs).square().mean()
    loss.backward()
    between, sent_between = time.perf_counter(), sent_bytes()
    for optimizer in optimizers:
        optimizer.step()
    own_s, own_bytes = time.perf_counter() - between, sent_bytes() - sent_between
    model.zero_grad()
    all_bytes = sent_bytes() - sent
    dist.barrier()
    return time.perf_counter() - begin, own_s, all_bytes, own_bytes, loss.item()


def rank_main(rank, options):
    torch.set_num_threads(1)
    store = f"tcp://{netlab.address(0)}:29500"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=HOSTS)
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    running = {}
    for key, make in ENGINES.items():
        model = make(build())
        running[key] = model, optimizers(model, key[1])
        if key[0] == "exchanged":
            exchange_matrices(running[key][1][0])
    steps = {key: [] for key in running}
    turns = list(running.items())
    for number in range(WARM_UP_ROUNDS + options.rounds):
        Random(number).shuffle(turns)
        for key, (model, steppers) in turns:
            steps[key].append(timed_step(model, steppers, inputs))
    names = ("step_s", "optimizer_s", "sent_bytes", "optimizer_sent_bytes")
    found = []
    for (engine, name), of_rounds in steps.items():
        columns = zip(*of_rounds[WARM_UP_ROUNDS:], strict=True)
        medians = [statistics.median(column) for column in columns]
        row = dict(zip(names, medians[:4], strict=True))
        pairs = list(zip(of_rounds, steps["fullshard", MUON], strict=True))[WARM_UP_ROUNDS:]
        row["step_of_ours"] = statistics.median(each[0] / ours[0] for each, ours in pairs)
        found.append({"engine": engine, "optimizer": name, **row, "last_loss": of_rounds[-1][-1]})
    if rank == 0:
        Path(options.folder, "rows.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate-mbit", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        rank_main(options.as_rank, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with netlab.Netlab(HOSTS, options.rate_mbit) as lab:
                for rank in range(HOSTS):
                    as_rank = ["--as-rank", str(rank), "--folder", folder]
                    lab.start(rank, [sys.executable, __file__, *sys.argv[1:], *as_rank])
                lab.wait()
        except netlab.Unavailable as reason:
            print(f"no hosts with slow links here: {reason}", file=sys.stderr)
            sys.exit(2)
        found = json.loads(Path(folder, "rows.json").read_text())
    table = Table(
        "engine", "optimizer", "step ms", "optimizer ms", "of ours", "sent MB", "in step() MB"
    )
    for row in found:
        seconds = [f"{row[key] * 1e3:.0f}" for key in ("step_s", "optimizer_s")]
        sent = [f"{row[key] / 1e6:.2f}" for key in ("sent_bytes", "optimizer_sent_bytes")]
        ratio = f"{row['step_of_ours']:.2f}"
        table.add_row(row["engine"], row["optimizer"], *seconds, ratio, *sent)
    Console().print(table)
    write_report(options.out, {"rate_mbit": options.rate_mbit, "ways": found})


if __name__ == "__main__":
    main()
