# SPDX-License-Identifier: Apache-2.0
"""What does a step on JAX need and take, beside what XLA makes of shardings, and data parallel?

    python benchmarks/jax_step.py [--time "29M, 4k tokens"] [--rounds 7] [--out FILE.json]

GPTs of `fullshard train` under AdamW in fp32, on eight simulated CPU devices (N), in four forms:
`make_train_step` with explicit collectives (shard_map); the same with the collectives left to XLA
(compiler: layers scanned and recomputed, weights constrained where they are used); kernels with a
NamedSharding under a plain `jax.jit`, as the document that asked for this has it (sharded jit); and
everything on every device (data parallel). The last two are neither scanned nor recomputed.

Memory, bytes sent and compilations are those of compiled programs, for each device; nothing is
allocated for them. Peak: arguments, temporary memory, and results with no place in the arguments;
in units of 4P/N, P being the parameters' bytes. Compilations: until a step's output has the
shardings of its input. Time, for the case named: the forms take turns (A B C D A B C D ...), and a
row has the median of its steps and the median over rounds of fullshard's time over its own. Two
processes, each with one device, exchange over Gloo on local ports.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.core.presets import Transformer
from fullshard.core.spec import ParamSpec
from fullshard.jax import Rule, communication, create_mesh, initialize, make_train_step
from fullshard.jax.collectives import communication_of
from fullshard.jax.elsewhere import memory_of
from fullshard.jax.placement import place_dims
from fullshard.jax.program import batch_sharding
from fullshard.train.jax.models import GPT

DEVICES = 8
OURS, THEIRS = "fullshard, shard_map", "fullshard, compiler"
SMALL = Transformer(8, 512, 8, 8, 1376, 4096, 256)
CASES = {  # shape, rows and tokens in a row of the global batch
    "235M, 1k tokens": (Transformer(12, 1024, 16, 16, 4096, 16_384, 128), 8, 128),
    "236M, 41k words": (Transformer(12, 1024, 16, 16, 2752, 40_960, 128), 8, 128),
    "29M, 4k tokens": (SMALL, 16, 256),
}
OVER_PROCESSES = {
    "29M, 64 tokens, 2 processes": (SMALL, 2, 32),
    "29M, 512 tokens, 2 processes": (SMALL, 2, 256),
}
OPTIMIZER = optax.adamw(1e-3)


def loss_fn(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


class Engine:
    """A `TrainStep` of ours."""

    def __init__(self, shape, mesh, mode):
        def make():
            return GPT(shape, rngs=nnx.Rngs(0))

        self.step = make_train_step(make, OPTIMIZER, loss_fn, mesh, mode=mode)
        self.numel = sum(each.numel for each in self.step.placements)

    def compiled(self, batch):
        """The program, its collectives, and how many were compiled."""
        program = self.step.compiled(batch)
        return program, communication(self.step, batch), self.step.compilations

    def start(self):
        return self.step.init()

    def run(self, state, batch):
        state, loss, _ = self.step(state, batch)
        return state, loss


class Jitted:
    """The same model under ``jax.jit``, its parameters placed by ``rule``; shardings of results
    are left to XLA.
    """

    def __init__(self, shape, mesh, rule):
        self.mesh = mesh
        self.make = lambda: nnx.split(GPT(shape, rngs=nnx.Rngs(0)))[1]
        self.graph, state = nnx.split(nnx.eval_shape(lambda: GPT(shape, rngs=nnx.Rngs(0))))
        flat = [(path, leaf.get_value()) for path, leaf in nnx.to_flat_state(state)]
        specs = [ParamSpec(".".join(map(str, p)), tuple(x.shape), x.dtype.name) for p, x in flat]
        self.numel = sum(spec.numel for spec in specs)
        placements = place_dims(specs, dict(mesh.shape), rule)
        shardings = [NamedSharding(mesh, PartitionSpec(*each.axes)) for each in placements]
        self.shardings = jax.tree.unflatten(jax.tree.structure(state), shardings)
        self.jitted = jax.jit(self.step, donate_argnums=0)

    def step(self, state, batch):
        params, optimizer = state

        def loss_of(params):
            return loss_fn(nnx.merge(self.graph, params), batch)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), loss

    def compiled(self, batch):
        """The program that later steps run, its collectives, and how many came to it."""
        shapes = jax.eval_shape(self.make)
        params = jax.tree.map(with_sharding, shapes, self.shardings)
        optimizer = jax.eval_shape(OPTIMIZER.init, params)
        optimizer = jax.tree.map(with_sharding, optimizer, self.optimizer_shardings(optimizer))
        state = (params, optimizer)
        count = 0
        while True:
            count += 1
            program = self.jitted.lower(state, batch).compile()
            after = jax.tree.map(with_sharding, state, program.output_shardings[0])
            if all(map(same_sharding, jax.tree.leaves(after), jax.tree.leaves(state))):
                return program, communication_of(program.as_text(), self.mesh.size), count
            state = after

    def start(self):
        params = jax.jit(self.make, out_shardings=self.shardings)()
        shardings = self.optimizer_shardings(jax.eval_shape(OPTIMIZER.init, params))
        return params, jax.jit(OPTIMIZER.init, out_shardings=shardings)(params)

    def optimizer_shardings(self, optimizer):
        """Moments as the parameters; anything else on every device."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        moments = jax.tree.structure(self.shardings)
        is_moment = lambda tree: jax.tree.structure(tree) == moments  # noqa: E731
        return jax.tree.map(
            lambda part: self.shardings if is_moment(part) else whole, optimizer, is_leaf=is_moment
        )

    def run(self, state, batch):
        return self.jitted(state, batch)


def with_sharding(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def same_sharding(one, other):
    return one.sharding.is_equivalent_to(other.sharding, one.ndim)


FORMS = {
    OURS: lambda shape, mesh: Engine(shape, mesh, "shard_map"),
    THEIRS: lambda shape, mesh: Engine(shape, mesh, "compiler"),
    "sharded jit": lambda shape, mesh: Jitted(shape, mesh, Rule(1024, only=("kernel",))),
    "data parallel": lambda shape, mesh: Jitted(shape, mesh, Rule(replicate=("",))),
}


def batch_of(mesh, shape, rows, tokens):
    """Shapes of a batch, with shardings."""
    leaf = jax.ShapeDtypeStruct((rows, tokens), np.int32)
    return {name: with_sharding(leaf, batch_sharding(mesh, leaf)) for name in "xy"}


def figures(form, mesh, batch):
    """What the compiled program of a form tells."""
    begin = time.perf_counter()
    program, traffic, count = form.compiled(batch)
    memory = memory_of(program)
    return {
        "parameters": form.numel,
        "peak_of_4p_over_n": memory["peak"] / (16 * form.numel / mesh.size),
        "peak_bytes": memory["peak"],
        "temporary_bytes": memory["temporary"],
        "sent_bytes": traffic.sent_bytes,
        "compilations": count,
        "compile_s": time.perf_counter() - begin,
    }


def take_turns(forms, mesh, case, rounds):
    """Seconds of each step and the last loss, by form."""
    shape, rows, tokens = case
    random = np.random.default_rng(0)
    like = batch_of(mesh, *case)

    def batch():
        drawn = random.integers(0, shape.vocab, (rows, tokens + 1)).astype(np.int32)
        parts = {"x": drawn[:, :-1], "y": drawn[:, 1:]}
        return {
            name: jax.make_array_from_callback(x.shape, like[name].sharding, lambda at, x=x: x[at])
            for name, x in parts.items()
        }

    states = {name: form.start() for name, form in forms.items()}
    found = {name: {"seconds": [], "loss": 0.0} for name in forms}
    for number in range(-2, rounds):  # two to warm up: the second may compile again
        now = batch()
        for name, form in forms.items():
            begin = time.perf_counter()
            states[name], loss = form.run(states[name], now)
            jax.block_until_ready((states[name], loss))
            if number >= 0:
                found[name]["seconds"].append(time.perf_counter() - begin)
            found[name]["loss"] = float(loss)
    for row in found.values():
        row["median_s"] = statistics.median(row["seconds"])
        ratios = [a / b for a, b in zip(found[OURS]["seconds"], row["seconds"], strict=True)]
        row["our_time_over_it"] = statistics.median(ratios)
    return found


def over_processes(rounds):
    """The engine's two modes over two processes of this script."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        path = Path(folder, "rows.json")
        script = [sys.executable, __file__, f"--rounds={rounds}", f"--port={port}", f"--out={path}"]
        env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        processes = [subprocess.Popen([*script, f"--process={rank}"], env=env) for rank in (0, 1)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError("a process failed")
        return json.loads(path.read_text())


def process_main(options):
    initialize(f"127.0.0.1:{options.port}", 2, options.process)
    mesh = create_mesh()
    rows = []
    for name, case in OVER_PROCESSES.items():
        forms = {form: FORMS[form](case[0], mesh) for form in (OURS, THEIRS)}
        times = take_turns(forms, mesh, case, options.rounds)
        for form, each in forms.items():
            found = figures(each, mesh, batch_of(mesh, *case))
            del found["compile_s"]  # compiled before
            rows.append({"case": name, "form": form, **found, **times[form]})
    if options.process == 0:
        options.out.write_text(json.dumps(rows))


def measure(options):
    mesh = create_mesh(fsdp=DEVICES)
    rows = []
    for name, case in CASES.items():
        forms = {form: make(case[0], mesh) for form, make in FORMS.items()}
        found = {form: figures(each, mesh, batch_of(mesh, *case)) for form, each in forms.items()}
        times = {}
        if name == options.time:
            times = take_turns(forms, mesh, case, options.rounds)
        rows += [
            {"case": name, "form": form, **row, **times.get(form, {})}
            for form, row in found.items()
        ]
    if options.time:
        rows += over_processes(options.rounds)
    return {"jax": jax.__version__, "rows": rows}


def printed(rows):
    columns = ("peak_of_4p_over_n", "temporary_bytes", "sent_bytes", "median_s", "our_time_over_it")
    table = Table("case", "form", *columns)
    for row in rows:
        cells = [row.get(key) for key in columns]
        table.add_row(row["case"], row["form"], *("" if x is None else f"{x:.4g}" for x in cells))
    Console(width=150).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--time", choices=CASES, help="the case to take times of")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        process_main(options)
        return
    found = measure(options)
    printed(found["rows"])
    write_report(options.out, found)


if __name__ == "__main__":
    main()
