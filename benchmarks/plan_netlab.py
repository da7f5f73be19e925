# SPDX-License-Identifier: Apache-2.0
"""Is the planner's choice the best one when its candidates are really run?

    sudo python benchmarks/plan_netlab.py [--hosts 2] [--rate-mbit 2000] [--rounds 7] [--out FILE]

Hosts are network namespaces with a slow link between them, as in `step_netlab`, and the model is
that of the step benchmarks. All ranks first measure their processor and the link together
(`fullshard calibrate` does the same), the model is recorded on fake tensors, and the planner
predicts every candidate: strategies, with units by block or without, at two prefetch depths. Then
the candidates are run in turns (A B C A B C ...). The last line tells how much longer the planner's
choice takes than the candidate that was really the fastest. Ends with status 2 where there can be
no such hosts.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import netlab
import torch
import torch.distributed as dist
from default_configuration import adamw
from report import write_report
from training_step import BLOCK, BLOCKS, TOKENS, WARM_UP_ROUNDS, WIDTH, build, step

from fullshard.core.strategy import Precision, Prefetch, ShardingStrategy
from fullshard.doctor.calibration import calibrate
from fullshard.plan import Run, Wrap, cluster_of, named_device, predict
from fullshard.plan.choose.settings import describe
from fullshard.plan.measured import MeasuredModel
from fullshard.plan.record import device_toml
from fullshard.torch import FullyShardedDataParallel, set_prefetch
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.measuring import record_step
from fullshard.wrap import ModuleWrapPolicy

PORT = 29510
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def candidates():
    """Every run that the planner may choose, by its words."""
    base = Run(param_dtype="float32", precision=Precision(), micro_batch=1)
    runs = [
        replace(base, strategy=ShardingStrategy[name], wrap=wrap, prefetch=Prefetch(depth, depth))
        for name in STRATEGIES
        for wrap, depths in ((Wrap.BLOCK, (1, 3)), (Wrap.NONE, (1,)))
        for depth in depths
        if name != "NO_SHARD" or depth == 1
    ]
    return {describe(run): run for run in runs}


def sharded(run):
    policy = ModuleWrapPolicy({BLOCK}) if run.wrap is Wrap.BLOCK else None
    model = FullyShardedDataParallel(
        build(), auto_wrap_policy=policy, sharding_strategy=run.strategy
    )
    set_prefetch(model, run.prefetch.forward, run.prefetch.backward)
    return model


def predicted(calibration_file, hosts):
    """Seconds of a step of each candidate, by its words."""
    cluster = cluster_of(named_device(calibration_file), hosts, per_host=1)
    inputs = torch.randn(1, TOKENS, WIDTH)
    recording = record_step(build(), (inputs,), loss=lambda output: output.float().square().mean())
    model = MeasuredModel.of("blocks", recording, [str(number) for number in range(BLOCKS)])
    return {name: predict(model, run, cluster).step_s for name, run in candidates().items()}


def rank_main(rank, options, folder):
    torch.set_num_threads(1)
    store = f"tcp://{netlab.address(0)}:{PORT}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.hosts)
    found = calibrate(torch.device("cpu"), ProcessGroupComm(dist.group.WORLD), "gloo")
    if rank == 0:
        file = Path(folder, "calibration.toml")
        file.write_text(device_toml(replace(found, per_host=1), found.origin), encoding="utf-8")
        foretold = predicted(str(file), options.hosts)
        Path(folder, "predicted.json").write_text(json.dumps(foretold))
    dist.barrier()
    inputs = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))
    made = {name: partial(sharded, run) for name, run in candidates().items()}
    running = {}
    for name, make in made.items():
        model = make()
        running[name] = model, adamw(model.parameters())
    seconds = {name: [] for name in running}
    for _ in range(WARM_UP_ROUNDS + options.rounds):
        for name, (model, optimizer) in running.items():
            dist.barrier()
            begin = time.perf_counter()
            step(model, optimizer, inputs)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
    if rank == 0:
        warm = {name: each[WARM_UP_ROUNDS:] for name, each in seconds.items()}
        Path(folder, "measured.json").write_text(json.dumps(warm))
    dist.barrier()
    dist.destroy_process_group()


def measure_all(options):
    with (
        tempfile.TemporaryDirectory() as folder,
        netlab.Netlab(options.hosts, options.rate_mbit) as lab,
    ):
        for rank in range(options.hosts):
            as_rank = ["--as-rank", str(rank), "--folder", folder]
            lab.start(rank, [sys.executable, __file__, *sys.argv[1:], *as_rank])
        lab.wait()
        read = {
            name: json.loads(Path(folder, f"{name}.json").read_text())
            for name in ("predicted", "measured")
        }
        read["calibration"] = Path(folder, "calibration.toml").read_text()
    return read


def told(found, options):
    """Rows by candidate, and how much longer the choice takes than the best."""
    medians = {name: statistics.median(each) for name, each in found["measured"].items()}
    choice = min(found["predicted"], key=found["predicted"].get)
    best = min(medians, key=medians.get)
    rounds = zip(found["measured"][choice], found["measured"][best], strict=True)
    longer = statistics.median(mine / theirs for mine, theirs in rounds) - 1
    rows = {
        name: {
            "hosts": options.hosts,
            "rate_mbit": options.rate_mbit,
            "predicted_s": found["predicted"][name],
            "measured_s": medians[name],
            "chosen": name == choice,
            "seconds": found["measured"][name],
        }
        for name in sorted(medians, key=medians.get)
    }
    for name, row in rows.items():
        mark = "<- chosen" if row["chosen"] else ""
        print(f"{name:<50} {row['predicted_s']:7.3f} s {row['measured_s']:7.3f} s {mark}")
    print(f"the choice takes {longer:+.1%} of the best of {len(rows)} candidates ({best})")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate-mbit", type=int, default=2000)
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
        found = measure_all(options)
    except netlab.Unavailable as why:
        print(f"plan_netlab: {why}", file=sys.stderr)
        sys.exit(2)
    print(found["calibration"])
    write_report(options.out, told(found, options))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
