# SPDX-License-Identifier: Apache-2.0
"""How many Python calls does a step make inside the engine, and how many go from file to file?

    python benchmarks/call_counts.py [--units 5] [--edges 12]

The script counts on rank 0 of two ranks, which are threads, the third step of a model of equal
layers with two parameters each. A call goes from file to file if the nearest frame of the package
above it belongs to another file. A call that torch makes (a hook, a dispatched operation) has no
such frame and counts as an entry. What `LocalWorld` does below its collectives is not counted, nor
are comprehensions. ``state_dict()``, which needs a mesh, and FSDP2 are counted over a process group
that does nothing. The counts repeat exactly. Figures over time are in docs/log.md.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from wire import Silence

import fullshard
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, fully_shard
from fullshard.wrap import ModuleWrapPolicy

WIDTH, RANKS, STEPS = 8, 2, 3
COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}
OURS = str(Path(fullshard.__file__).parent)
THEIRS = str(Path(torch_fsdp.__file__).parent)
OUTSIDE = sys.modules[LocalWorld.__module__].__file__


class Calls:
    """A context in which this thread's calls into the files below ``root`` are counted."""

    def __init__(self, root):
        self.root = root
        self.calls = Counter()  # (caller's file or "torch", file) -> number of calls

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name in COMPREHENSIONS:
            return
        if not code.co_filename.startswith(self.root):
            return
        above = frame.f_back
        while above is not None and not self._is_ours(above.f_code):
            above = above.f_back
        caller = "torch" if above is None else self._short(above)
        if above is None or above.f_code.co_filename != OUTSIDE:
            self.calls[caller, self._short(frame)] += 1

    def _is_ours(self, code):
        """Whether it belongs to the package and is not the frame below a thread that is a rank."""
        return code.co_filename.startswith(self.root) and code.co_name != "rank_main"

    def _short(self, frame):
        path = Path(frame.f_code.co_filename).relative_to(self.root)
        return path.as_posix().removeprefix("torch/")

    @property
    def number(self):
        return self.calls.total()

    @property
    def entries(self):
        return sum(n for (caller, _), n in self.calls.items() if caller == "torch")

    @property
    def crossings(self):
        pairs = self.calls.items()
        return sum(n for (a, b), n in pairs if a != b and a != "torch")


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def layers(units):
    """A model of ``units`` units: that many layers but one, and a head in the root's."""
    model = nn.Sequential(*(Layer() for _ in range(units - 1)), nn.Linear(WIDTH, WIDTH))
    for param in model.parameters():
        nn.init.constant_(param, 0.1)  # ranks that are threads share one random generator
    return model


def by_function(units, shard):
    model = layers(units)
    for layer in model[:-1]:
        shard(layer)
    return shard(model)


def count_step(model, root):
    """Calls in the parts of the third step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = {}
    for step in range(STEPS):
        inputs = torch.full((2, WIDTH), float(step))
        with Calls(root) as forward:
            loss = model(inputs).sum()
        with Calls(root) as backward:
            loss.backward()
        with Calls(root) as update:
            optimizer.step()
            optimizer.zero_grad()
        found = {"forward": forward, "backward": backward, "optimizer": update}
    return found


def count_state_dict(model, root):
    """Calls in ``state_dict()``."""
    model(torch.zeros(2, WIDTH)).sum().backward()
    with Calls(root) as state_dict:
        model.state_dict()
    return {"state_dict": state_dict}


def on_threads(build):
    """Rank 0's counts of our engine in a step."""
    return LocalWorld(RANKS).run(lambda comm: count_step(build(comm), OURS))[0]


def over_nothing(build, root, *counts):
    """The counts of an engine over a process group that does nothing, which has a mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = {}
    with Silence().patched():
        for count in counts:
            found |= count(build(None), root)
    dist.destroy_process_group()
    return found


def wrapper(units, comm):
    policy = ModuleWrapPolicy({Layer})
    return FullyShardedDataParallel(layers(units), comm, auto_wrap_policy=policy)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=5)
    parser.add_argument("--edges", type=int, default=12, help="how many pairs of files to list")
    args = parser.parse_args()
    units = args.units
    builds = {
        "fully_shard": lambda comm: by_function(units, lambda each: fully_shard(each, mesh=comm)),
        "wrapper": lambda comm: wrapper(units, comm),
    }
    theirs = lambda _: by_function(units, torch_fsdp.fully_shard)  # noqa: E731
    engines = {"FSDP2": over_nothing(theirs, THEIRS, count_step, count_state_dict)}
    for name, build in builds.items():
        engines[name] = on_threads(build) | over_nothing(build, OURS, count_state_dict)
    table = Table("engine", "part", "calls", "file to file", "entries")
    edges = Counter()
    for engine, found in engines.items():
        for part, calls in found.items():
            table.add_row(engine, part, *map(str, (calls.number, calls.crossings, calls.entries)))
        step = [found["forward"], found["backward"]]
        total = [sum(getattr(c, kind) for c in step) for kind in ("number", "crossings", "entries")]
        table.add_row(engine, "forward + backward", *map(str, total), end_section=True)
        if engine == "fully_shard":
            edges = sum((calls.calls for calls in step), Counter())
    Console().print(table)
    listed = Table("from", "to", "calls", title="fully_shard, forward and backward")
    crossing = Counter({pair: n for pair, n in edges.items() if len(set(pair)) == 2})
    for (caller, file), number in crossing.most_common(args.edges):
        listed.add_row(caller, file, str(number))
    Console().print(listed)


if __name__ == "__main__":
    main()
