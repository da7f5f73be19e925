# SPDX-License-Identifier: Apache-2.0
"""How close does a step come to what link and processor allow, on hosts with slow links?

    sudo python benchmarks/step_netlab.py [--hosts 2] [--rate-mbit 2000] [--traffic float32]
                                          [--ranks-per-host 1] [--optimizer fused]
                                          [--only REGEX] [--rounds 7] [--out FILE.json]

Hosts are network namespaces of this machine, with one rank each unless told otherwise (see
`netlab`); with several a host, the rows named "direct" do without exchanges in two stages. The
engines take turns in one run (A B C D, C A D B, ...), in the configuration that
`default_configuration` names, or with AdamW's foreach form; with ``--only`` those that it matches
and those that the ratios are to.
No step can be shorter than the limit: max(the same step without communication, all ranks computing
at once; bytes that must cross / rate of the link). A link counts headers, too, of which bytes that
must cross have none: TCP itself reaches 0.956 of that limit ("of TCP's" is to what TCP can carry).
"Two ahead" holds one unit more (`set_prefetch(model, 2, 2)`). Ratios are medians over rounds of the
ratios within a round, those to FSDP2 and DDP of throughput. Bytes sent are those that a host's
interface counted, of all its ranks, protocol included. Ends with status 2 where there can be no
such hosts.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import netlab
import torch
import torch.distributed as dist
from default_configuration import ADAMW, adamw, ddp, fsdp1, fsdp2, fullshard, plain
from report import write_report
from rich.console import Console
from rich.table import Column, Table
from torch.distributed.device_mesh import init_device_mesh
from training_step import BESIDE_FORWARD, BLOCK, build, take_turns, throughput_ratio

from fullshard.torch import CommunicationCompression, set_prefetch
from fullshard.torch.comm.hierarchical import PRETEND

ALONE = "plain, alone"
TWO_AHEAD = ", two ahead"
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
BYTE = (1 + 4 / 256) / 4  # of an int8 number, with its part of a block's scale, in fp32 numbers
COMPRESSED = {  # what gathers and reduces send of fp32 numbers
    "bf16": (CommunicationCompression("bf16", "bf16"), 1 / 2, 1 / 2),
    "int8, reduces in bf16": (CommunicationCompression("int8", "bf16"), BYTE, 1 / 2),
    "int8": (CommunicationCompression("int8", "int8"), BYTE, BYTE),
    "int8 with feedback": (
        CommunicationCompression("int8", "int8", error_feedback=True),
        BYTE,
        BYTE,
    ),
}
OPTIMIZERS = {"fused": adamw, "foreach": partial(adamw, lr=ADAMW["lr"], foreach=True)}
PORT = 29500


def must_cross_bytes(engine, full_bytes, ranks):
    """Bytes that each rank has to send in a step, for what the engine's strategy does.

    Of hosts with several ranks, what a host has to send: as if it were one rank.

    Each gather and the reduce send (S-1)/S of the parameters, S being the ranks that share them;
    an all-reduce over R replicas sends 2(R-1)/R of a rank's slice of the gradients.
    """
    if engine == ALONE:
        return 0.0
    gathers, sharing = 2, ranks
    if "SHARD_GRAD_OP" in engine:
        gathers = 1
    if "HYBRID_SHARD" in engine:
        sharing = ranks // 2
    if engine == "DDP":
        gathers, sharing = 0, 1
    replicas = ranks // sharing
    _, of_gather, of_reduce = COMPRESSED.get(engine.partition(", ")[2], (None, 1, 1))
    gathered_and_reduced = (gathers * of_gather + of_reduce) * (sharing - 1) / sharing
    return full_bytes * (gathered_and_reduced + 2 * (replicas - 1) / replicas / sharing)


def engines(ranks, dtype):
    """What makes each engine's model; the hybrid ones where hosts can be parted in two pairs."""

    def two_ahead():
        model = fullshard(build(), BLOCK, dtype)
        set_prefetch(model, 2, 2)
        return model

    options = {"FULL_SHARD": {}, "SHARD_GRAD_OP": {"reshard_after_forward": False}}
    if ranks % 2 == 0 and ranks > 2:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        options["HYBRID_SHARD"] = {"mesh": mesh}
    made = {
        ALONE: lambda: plain(build(), dtype),
        "DDP": lambda: ddp(build(), dtype),
        "FSDP1": lambda: fsdp1(build(), BLOCK, dtype),
    }
    for name, shard in (("FSDP2", fsdp2), ("fullshard", fullshard)):
        for strategy, chosen in options.items():
            made[f"{name} {strategy}"] = partial(
                lambda shard, chosen: shard(build(), BLOCK, dtype, **chosen), shard, chosen
            )
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        made[f"fullshard {strategy} by element"] = partial(
            lambda chosen: fullshard(build(), BLOCK, dtype, align="element", **chosen),
            options[strategy],
        )
        made[f"fullshard {strategy}{BESIDE_FORWARD}"] = made[f"fullshard {strategy}"]
    made[f"fullshard FULL_SHARD{TWO_AHEAD}"] = two_ahead
    made[f"fullshard FULL_SHARD{TWO_AHEAD}{BESIDE_FORWARD}"] = two_ahead
    for name, (compression, _, _) in COMPRESSED.items() if dtype is None else ():
        made[f"fullshard FULL_SHARD, {name}"] = partial(
            lambda chosen: fullshard(build(), BLOCK, compression=chosen), compression
        )
    return made


def engines_in_two_forms(ranks_per_host, dtype):
    """The same of several ranks a host, where fullshard is there with and without two stages."""
    os.environ[PRETEND] = str(ranks_per_host)  # since all hosts here have one name
    made = {
        name: make
        for name, make in engines(dist.get_world_size(), dtype).items()
        if "HYBRID_SHARD" not in name and not name.startswith("fullshard FULL_SHARD, ")
    }
    everybody = dist.new_group()

    def direct(**chosen):
        os.environ[PRETEND] = "1"
        model = fullshard(build(), BLOCK, dtype, mesh=everybody, **chosen)
        os.environ[PRETEND] = str(ranks_per_host)
        return model

    made["fullshard FULL_SHARD, direct"] = direct
    made["fullshard SHARD_GRAD_OP, direct"] = partial(direct, reshard_after_forward=False)
    return made


def wanted(engine, only):
    return engine in (ALONE, "DDP", "FSDP2 FULL_SHARD") or re.search(only, engine) is not None


def rank_main(rank, options, folder):
    torch.set_num_threads(1)
    store = f"tcp://{netlab.address(0)}:{PORT}"
    world = options.hosts * options.ranks_per_host
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    dtype = DTYPES[options.traffic]
    if options.ranks_per_host == 1:
        made = engines(world, dtype)
    else:
        made = engines_in_two_forms(options.ranks_per_host, dtype)
    found = take_turns(
        {name: make for name, make in made.items() if wanted(name, options.only)},
        ALONE,
        options.rounds,
        lambda: int(netlab.SENT_BYTES.read_text()),
        OPTIMIZERS[options.optimizer],
    )
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(options):
    """What every rank found."""
    with (
        tempfile.TemporaryDirectory() as folder,
        netlab.Netlab(options.hosts, options.rate_mbit) as lab,
    ):
        ranks = range(options.hosts * options.ranks_per_host)
        for rank in ranks:
            as_rank = ["--as-rank", str(rank), "--folder", folder]
            host = rank // options.ranks_per_host
            lab.start(host, [sys.executable, __file__, *sys.argv[1:], *as_rank])
        lab.wait()
        each = [Path(folder, f"{rank}.json").read_text() for rank in ranks]
    return [json.loads(text) for text in each]


def summarised(found, options):
    """A row for each engine."""
    bytes_each = 4 if options.traffic == "float32" else 2
    full_bytes = bytes_each * sum(p.numel() for p in build().parameters())
    seconds = {name: row["seconds"] for name, row in found[0].items()}
    rows = {}
    for name, times in seconds.items():
        must = must_cross_bytes(name, full_bytes, options.hosts)
        sent = statistics.mean(statistics.median(r[name]["sent_bytes"]) for r in found)
        wire_s = must * 8 / (options.rate_mbit * 1e6)
        limits = [max(alone, wire_s) for alone in seconds[ALONE]]
        carried = [max(alone, wire_s / netlab.PAYLOAD_SHARE) for alone in seconds[ALONE]]
        rows[name] = {
            "traffic": options.traffic,
            "hosts": options.hosts,
            "ranks_per_host": options.ranks_per_host,
            "rate_mbit": options.rate_mbit,
            "optimizer": options.optimizer,
            "step_s": statistics.median(times),
            "limit_s": statistics.median(limits),
            "of_limit": throughput_ratio(times, limits),
            "of_tcp_limit": throughput_ratio(times, carried),
            "of_fsdp2": throughput_ratio(times, seconds["FSDP2 FULL_SHARD"]),
            "of_ddp": throughput_ratio(times, seconds["DDP"]),
            "sent_bytes": round(sent),
            "must_cross_bytes": round(must),
            "sent_of_must": sent / must if must else None,
            "loss": found[0][name]["losses"][-1],
            "seconds": times,
        }
    return rows


def printed(rows):
    ratios = {"of_limit": "of limit", "of_tcp_limit": "of TCP's"}
    ratios |= {"of_fsdp2": "of FSDP2", "of_ddp": "of DDP"}
    table = Table(
        Column("engine", no_wrap=True),
        "ms a step",
        "limit",
        *ratios.values(),
        "MB sent",
        "of must",
        "loss",
    )
    for name, row in rows.items():
        sent_of_must = row["sent_of_must"]
        table.add_row(
            name,
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['limit_s'] * 1e3:.0f}",
            *(f"{row[key]:.2f}" for key in ratios),
            f"{row['sent_bytes'] / 1e6:.1f}",
            "" if sent_of_must is None else f"{sent_of_must:.3f}",
            f"{row['loss']:.6f}",
        )
    first = next(iter(rows.values()))
    hosts = f"{first['hosts']} hosts with {first['ranks_per_host']} ranks each"
    table.title = f"{hosts}, {first['rate_mbit']} Mbit/s, {first['traffic']}, {first['optimizer']}"
    Console(width=130).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate-mbit", type=int, default=2000)
    parser.add_argument("--traffic", choices=DTYPES, default="float32")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="fused")
    parser.add_argument("--only", default="", help="engines by a regular expression")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error("--hosts must be at least 2")
    if options.as_rank is not None:
        rank_main(options.as_rank, options, options.folder)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are cleaned up
    try:
        found = measure(options)
    except netlab.Unavailable as why:
        print(f"step_netlab: {why}", file=sys.stderr)
        sys.exit(2)
    rows = summarised(found, options)
    printed(rows)
    write_report(options.out, rows)


if __name__ == "__main__":
    main()
