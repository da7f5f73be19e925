# SPDX-License-Identifier: Apache-2.0
"""How long do checkpoints take on JAX, beside Orbax? Same arrays, same disk, 8 simulated devices.

    python benchmarks/checkpoint_jax.py [--rounds 4] [--mebibytes 900] [--folder FOLDER]

They take turns (A B A B). Writes JSON to standard output.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fullshard.jax import load_checkpoint, save_checkpoint

ROWS, COLUMNS = 1024, 4096


def build(mebibytes):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    draw = np.random.default_rng(0)
    count = mebibytes * 2**20 // (4 * ROWS * COLUMNS)
    return {
        f"w{number}": jax.device_put(draw.random((ROWS, COLUMNS), np.float32), sharding)
        for number in range(count)
    }


def timed(work):
    begin = time.perf_counter()
    result = jax.block_until_ready(work())
    return time.perf_counter() - begin, result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=900)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    state = build(given.mebibytes)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    found = {}

    def note(name, seconds):
        found.setdefault(name, []).append(round(seconds, 4))

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
        checkpointer = ocp.StandardCheckpointer()
        for turn in range(given.rounds + 1):  # the first turn warms up, and is not counted
            if turn == 1:
                found.clear()
            shutil.rmtree(theirs, ignore_errors=True)
            begin = time.perf_counter()
            checkpointer.save(theirs, state)
            note("orbax async blocked", time.perf_counter() - begin)
            checkpointer.wait_until_finished()
            note("orbax save", time.perf_counter() - begin)
            shutil.rmtree(ours, ignore_errors=True)
            note("fullshard save", timed(lambda: save_checkpoint(ours, state, step=1).wait())[0])
            shutil.rmtree(ours, ignore_errors=True)
            begin = time.perf_counter()
            saving = save_checkpoint(ours, state, step=1, asynchronous=True)
            note("fullshard async blocked", time.perf_counter() - begin)
            saving.wait()
            note("orbax load", timed(lambda: checkpointer.restore(theirs, like))[0])
            note("fullshard load", timed(lambda: load_checkpoint(ours, like).state)[0])
    middle = {name: statistics.median(each) for name, each in found.items()}
    ratios = {
        f"{what}: orbax / fullshard": round(
            middle[f"orbax {what}"] / middle[f"fullshard {what}"], 3
        )
        for what in ("save", "load", "async blocked")
    }
    print(json.dumps({"mebibytes": given.mebibytes, "seconds": found, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
