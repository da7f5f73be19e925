# SPDX-License-Identifier: Apache-2.0
"""What does a step on JAX need and take, beside the best that is made of `jax.jit` by hand?

    python benchmarks/jax_step.py [--models small words] [--time small] [--rounds 7] [--out FILE]

Four language models as one writes them in JAX (stacked layers, `lax.scan`, `jax.checkpoint`), under
AdamW in fp32, on eight simulated CPU devices (N). Honest jit: each array's largest dimension is cut
by a NamedSharding, out_shardings are pinned, and XLA does the rest. Activations cut: the same, and
activations are constrained to the batch axis. Vocabulary cut: that, and a head whose logits are cut
along the classes. shard_map by hand: layers that gather their slices, a lookup and a chunked loss
in tables that are cut along the classes, in some eighty lines of ordinary JAX. fullshard: the plain
model in `make_train_step`, the same with `embed` and `cross_entropy` (tables), and with `gathered`
around its layers as well (helpers).

Memory and bytes sent are those of compiled programs, for each device; nothing is allocated for
them, so the largest model costs seconds to compile. Peak: arguments, temporary memory, and results
with no place in the arguments; in units of 4P/N, P being the parameters' bytes. Bytes sent are told
in P. Time, for models named: the forms take turns (A B C A B C ...), and a row has the median of
its steps and the median over rounds of fullshard's time over its own. Two processes, each with one
device, exchange over Gloo on local ports.
"""

import argparse
import functools
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
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from report import write_report
from rich.console import Console
from rich.table import Table

from fullshard.jax import (
    batch_sharding,
    create_mesh,
    cross_entropy,
    embed,
    gathered,
    make_train_step,
    shardings,
)
from fullshard.jax.analysis import memory_of, traffic_of

DEVICES = 8
BY_HAND, OURS = "shard_map by hand", "fullshard, helpers"
MODELS = {  # width, layers, words, heads, rows and tokens in a row of the global batch
    "small": (256, 8, 4096, 8, 8, 128),
    "words": (768, 8, 50_257, 12, 8, 64),
    "long": (512, 6, 4096, 8, 8, 4096),
    "large": (2048, 24, 32_768, 16, 8, 64),
}
OVER_PROCESSES = {"2 processes, 64 tokens": (512, 8, 4096, 8, 2, 32)}
OPTIMIZER = optax.adamw(1e-3)


def shapes_of(model):
    width, layers, words, *_ = model

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    return {
        "embed": shape(words, width),
        "layers": {
            "norm1": shape(layers, width),
            "qkv": shape(layers, width, 3 * width),
            "out": shape(layers, width, width),
            "norm2": shape(layers, width),
            "up": shape(layers, width, 4 * width),
            "down": shape(layers, 4 * width, width),
        },
        "norm": shape(width),
        "head": shape(width, words),
    }


def make(model):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    return jax.tree_util.tree_map_with_path(
        lambda path, x: (
            jnp.ones(x.shape)
            if "norm" in path[-1].key
            else 0.02 * jax.random.normal(next(keys), x.shape)
        ),
        shapes_of(model),
    )


def normed(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def layer_of(heads):
    def layer(weights, x):
        rows, length, width = x.shape
        parts = jnp.split(normed(x, weights["norm1"]) @ weights["qkv"], 3, -1)
        query, key, value = (part.reshape(rows, length, heads, -1) for part in parts)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.reshape(rows, length, width) @ weights["out"]
        return x + jax.nn.gelu(normed(x, weights["norm2"]) @ weights["up"]) @ weights["down"]

    return layer


def loss_of(model, keep=lambda x: x, losses=None, look_up=None, around=lambda layer: layer):
    """The loss of a model; ``keep`` is done to activations, ``around`` to layers."""
    layer = around(layer_of(model[3]))

    def loss(params, batch):
        @jax.checkpoint
        def body(x, weights):
            return keep(layer(weights, keep(x))), None

        rows = look_up(params["embed"], batch["x"]) if look_up else params["embed"][batch["x"]]
        x, _ = lax.scan(body, keep(rows), params["layers"])
        x = normed(x, params["norm"])
        if losses:
            return losses(x, params["head"], batch["y"]).mean()
        logits = x @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss


class Jitted:
    """An honest `jax.jit`, with what is constrained in ``loss``."""

    def __init__(self, model, mesh, loss):
        self.mesh, self.model = mesh, model
        shapes = shapes_of(model)
        params = shardings(shapes, mesh)
        state = jax.eval_shape(OPTIMIZER.init, shapes)
        whole = NamedSharding(mesh, PartitionSpec())
        moments = jax.tree.structure(shapes)
        is_moment = lambda tree: jax.tree.structure(tree) == moments  # noqa: E731
        kept = jax.tree.map(lambda x: params if is_moment(x) else whole, state, is_leaf=is_moment)
        self.shapes, self.shardings = (shapes, state), (params, kept)

        def step(state, batch):
            params, kept = state
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, kept = OPTIMIZER.update(grads, kept, params)
            return (optax.apply_updates(params, updates), kept), value

        self.jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.shardings, whole))

    def compiled(self, batch):
        state = jax.tree.map(with_sharding, self.shapes, self.shardings)
        return self.jitted.lower(state, batch).compile()

    def start(self):
        params = jax.jit(lambda: make(self.model), out_shardings=self.shardings[0])()
        return params, jax.jit(OPTIMIZER.init, out_shardings=self.shardings[1])(params)

    def run(self, state, batch):
        return self.jitted(state, batch)


class Engine:
    """A step of ours, of one mode."""

    def __init__(self, step):
        self.step = step

    def compiled(self, batch):
        return self.step.compiled(batch)

    def start(self):
        return self.step.init()

    def run(self, state, batch):
        state, loss, _ = self.step(state, batch)
        return state, loss


def jitted_forms(model, mesh):
    def cut(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("fsdp")))

    def losses(hidden, head, targets):
        whole = NamedSharding(mesh, PartitionSpec())
        classes = NamedSharding(mesh, PartitionSpec(None, None, "fsdp"))
        hidden = lax.with_sharding_constraint(hidden, whole)
        logits = lax.with_sharding_constraint(hidden @ head, classes)
        hit = jnp.arange(logits.shape[-1]) == targets[..., None]
        return jax.nn.logsumexp(logits, -1) - jnp.where(hit, logits, 0).sum(-1)

    return {
        "honest jit": Jitted(model, mesh, loss_of(model)),
        "activations cut": Jitted(model, mesh, loss_of(model, cut)),
        "vocabulary cut": Jitted(model, mesh, loss_of(model, cut, losses)),
        BY_HAND: Jitted(model, mesh, ByHand(mesh).loss(model)),
    }


# ---- the same by hand: what one writes in JAX who knows where the bytes go ----------------------


class ByHand:
    """Layers, lookups and losses inside of `jax.shard_map`."""

    def __init__(self, mesh):
        self.mesh, self.rows, self.count = mesh, PartitionSpec("fsdp"), mesh.shape["fsdp"]
        self.mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def loss(self, model):
        return loss_of(model, losses=self.losses, look_up=self.look_up, around=self.around)

    def around(self, layer):
        def gathered_layer(weights, x):
            specs = {name: at.spec for name, at in shardings(weights, self.mesh).items()}
            cuts = {name: spec.index("fsdp") for name, spec in specs.items()}

            def local(slices, x):
                return layer(self.whole(slices, cuts), x)

            return self.mapped(local, in_specs=(specs, self.rows), out_specs=self.rows)(weights, x)

        return gathered_layer

    def whole(self, slices, cuts):
        count = self.count
        small = [n for n, x in slices.items() if x.nbytes * count < 1 << 19]
        packed = jnp.concatenate([slices[n].reshape(-1) for n in small])
        packed = lax.all_gather(packed, "fsdp")
        full, start = {}, 0
        for name, x in slices.items():
            if name not in small:
                full[name] = lax.all_gather(x, "fsdp", axis=cuts[name], tiled=True)
                continue
            part = packed[:, start : start + x.size].reshape(count, *x.shape)
            part = jnp.moveaxis(part, 0, cuts[name])
            shape = list(x.shape)
            shape[cuts[name]] *= count
            full[name], start = part.reshape(shape), start + x.size
        return full

    def look_up(self, table, tokens):
        def local(table, tokens):
            places, there = mine(lax.all_gather(tokens, "fsdp", tiled=True), table.shape[0])
            found = jnp.where(there[..., None], table[places], 0)
            return lax.psum_scatter(found, "fsdp", tiled=True)

        table = jnp.pad(table, [(0, -table.shape[0] % self.count), (0, 0)])
        specs = (self.rows, self.rows)
        return self.mapped(local, in_specs=specs, out_specs=self.rows)(table, tokens)

    def losses(self, hidden, head, targets):
        words = head.shape[1]

        def local(head, hidden, targets):
            @jax.checkpoint
            def one(_, chunk):
                hidden, targets = (lax.all_gather(x, "fsdp", tiled=True) for x in chunk)
                first = lax.axis_index("fsdp") * head.shape[1]
                there = first + jnp.arange(head.shape[1]) < words
                return None, cut_losses(jnp.where(there, hidden @ head, -jnp.inf), targets)

            chunks = [
                jnp.moveaxis(x.reshape(x.shape[0], 8, -1, *x.shape[2:]), 1, 0)
                for x in (hidden, targets)
            ]
            return jnp.moveaxis(lax.scan(one, None, tuple(chunks))[1], 0, 1).reshape(targets.shape)

        head = jnp.pad(head, [(0, 0), (0, -words % self.count)])
        specs = (PartitionSpec(None, "fsdp"), self.rows, self.rows)
        return self.mapped(local, in_specs=specs, out_specs=self.rows)(head, hidden, targets)


def mine(tokens, size):
    places = tokens - lax.axis_index("fsdp") * size
    there = (places >= 0) & (places < size)
    return jnp.where(there, places, 0), there


def cut_losses(logits, targets):
    """Losses of this device's examples, from everybody's logits of its classes."""
    most = lax.all_gather(lax.stop_gradient(logits).max(-1), "fsdp").max(0)
    places, there = mine(targets, logits.shape[-1])
    picked = jnp.take_along_axis(logits, places[..., None], -1)[..., 0]
    total = jnp.exp(logits - most[..., None]).sum(-1)
    sums = jnp.stack([total, jnp.where(there, picked, 0)], 1)
    sums = lax.psum_scatter(sums, "fsdp", tiled=True)
    size = sums.shape[0]
    most = lax.dynamic_slice_in_dim(most, lax.axis_index("fsdp") * size, size)
    return jnp.log(sums[:, 0]) + most - sums[:, 1]


# ---- ours ---------------------------------------------------------------------------------------


def engine_forms(model, mesh):
    def step(loss):
        return Engine(make_train_step(lambda: make(model), OPTIMIZER, loss, mesh))

    tables = {"losses": cross_entropy, "look_up": embed}
    return {
        "fullshard, no helper": step(loss_of(model)),
        "fullshard, tables": step(loss_of(model, **tables)),
        OURS: step(loss_of(model, **tables, around=gathered)),
    }


def with_sharding(shape, sharding):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def batch_of(model, mesh):
    leaf = jax.ShapeDtypeStruct(model[4:6], np.int32)
    return {name: with_sharding(leaf, batch_sharding(mesh)) for name in "xy"}


def figures(form, model, mesh, batch):
    begin = time.perf_counter()
    program = form.compiled(batch)
    numel = sum(x.size for x in jax.tree.leaves(shapes_of(model)))
    peak = memory_of(program)["peak"]
    sent = traffic_of(program.as_text(), mesh.size).sent_bytes
    return {
        "parameters": numel,
        "peak_of_4p_over_n": peak / (16 * numel / mesh.size),
        "sent_of_p": sent / (4 * numel),
        "peak_bytes": peak,
        "sent_bytes": sent,
        "compile_s": time.perf_counter() - begin,
    }


def take_turns(forms, model, mesh, rounds):
    """Seconds of each step and the last loss, by form."""
    random = np.random.default_rng(0)
    like = batch_sharding(mesh)

    def batch():
        drawn = random.integers(0, model[2], (model[4], model[5] + 1)).astype(np.int32)
        parts = {"x": drawn[:, :-1], "y": drawn[:, 1:]}
        return {
            name: jax.make_array_from_callback(x.shape, like, lambda at, x=x: x[at])
            for name, x in parts.items()
        }

    states = {name: form.start() for name, form in forms.items()}
    found = {name: {"seconds": [], "loss": 0.0} for name in forms}
    for number in range(-2, rounds):  # two to warm up
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
    """The same over two processes of this script."""
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


def rows_of(name, model, mesh, rounds):
    batch = batch_of(model, mesh)
    forms = {**jitted_forms(model, mesh), **engine_forms(model, mesh)}
    rows = [
        {"model": name, "form": form, **figures(each, model, mesh, batch)}
        for form, each in forms.items()
    ]
    if rounds:
        times = take_turns(forms, model, mesh, rounds)
        rows = [{**row, **times[row["form"]]} for row in rows]
    return rows


def process_main(options):
    jax.distributed.initialize(f"127.0.0.1:{options.port}", 2, options.process)
    mesh = create_mesh()
    rows = [
        row
        for name, model in OVER_PROCESSES.items()
        for row in rows_of(name, model, mesh, options.rounds)
    ]
    if options.process == 0:
        options.out.write_text(json.dumps(rows))


def measure(options):
    mesh = create_mesh(fsdp=DEVICES)
    rows = []
    for name in options.models:
        rounds = options.rounds if name in options.time else 0
        rows += rows_of(name, MODELS[name], mesh, rounds)
        printed([row for row in rows if row["model"] == name])
    if options.time:
        rows += over_processes(options.rounds)
    return {"jax": jax.__version__, "rows": rows}


def printed(rows):
    columns = ("peak_of_4p_over_n", "sent_of_p", "compile_s", "median_s", "our_time_over_it")
    table = Table("model", "form", *columns)
    for row in rows:
        cells = [row.get(key) for key in columns]
        texts = ["" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in cells]
        table.add_row(row["model"], row["form"], *texts)
    Console(width=150).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--time", nargs="*", choices=MODELS, default=[], help="models to run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        process_main(options)
        return
    found = measure(options)
    printed([row for row in found["rows"] if row["model"] in OVER_PROCESSES])
    write_report(options.out, found)


if __name__ == "__main__":
    main()
