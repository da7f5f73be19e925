# SPDX-License-Identifier: Apache-2.0
"""How long does a file of weights take, and how much memory beside the shards? On Gloo, Linux.

    python benchmarks/stream_weights.py [--ranks 4] [--mib 1024] [--out FILE.json]

The model is half one parameter and half small layers. Compared with saving the whole state dict,
which rank 0 alone keeps.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import write_report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fullshard.torch import fully_shard, load_full_weights, save_full_weights
from fullshard.torch.comm.process_group import ProcessGroupComm
from fullshard.torch.comm.watch.roll_call import call_roll

WIDTH = 2048
MIB = 2**20


def build(mib: int) -> nn.Sequential:
    """A sharded model of ``mib`` MiB; no rank has more than its shard at any time."""
    layer_bytes = 4 * WIDTH * WIDTH
    with torch.device("meta"):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib * MIB // 2 // layer_bytes)]
        model = nn.Sequential(nn.Embedding(mib * MIB // 2 // (4 * WIDTH), WIDTH), *layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.local.fill_(1.0)  # type: ignore[attr-defined]
    return model


def memory_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure(action: Callable[[], object]) -> dict[str, float]:
    """Seconds of ``action``, and by how much the memory of this process rose meanwhile."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    return {"s": seconds, "extra_mib": (memory_bytes("VmHWM") - before) / MIB}


def save_whole(model: nn.Module, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        safetensors.torch.save_file(state, path)


def rank_main(rank: int, world: int, folder: str, mib: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(Path(folder, "port").read_text()), world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, path = build(mib), Path(folder, "weights.safetensors")
    ways = {
        "save unit by unit": lambda: save_full_weights(model, path),
        "load in pieces": lambda: load_full_weights(model, path),
        "save a whole state dict": lambda: save_whole(model, path),
    }
    rows = {name: measure(way) for name, way in ways.items()}
    comm, calls = ProcessGroupComm(dist.group.WORLD), 200
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call_roll(comm, "a roll call", "")
    rows["a roll call"] = {"s": (time.perf_counter() - start) / calls, "extra_mib": 0.0}
    Path(folder, f"rows-{rank}.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        probe = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        Path(folder, "port").write_text(str(probe.port))
        del probe
        given = (arguments.ranks, folder, arguments.mib)
        mp.spawn(rank_main, given, nprocs=arguments.ranks)
        ranks = [
            json.loads(Path(folder, f"rows-{rank}.json").read_text())
            for rank in range(arguments.ranks)
        ]
    table = Table("", "s", "rank 0 extra MiB", "most of the others, MiB")
    rows = []
    for name in ranks[0]:
        seconds = max(rank[name]["s"] for rank in ranks)
        first, *others = (rank[name]["extra_mib"] for rank in ranks)
        most = max(others, default=0.0)
        rows.append({"way": name, "s": seconds, "first_mib": first, "others_mib": most})
        table.add_row(name, f"{seconds:.4g}", f"{first:.0f}", f"{most:.0f}")
    Console().print(table)
    write_report(arguments.out, {"ranks": arguments.ranks, "mib": arguments.mib, "ways": rows})


if __name__ == "__main__":
    main()
