# SPDX-License-Identifier: Apache-2.0
"""Is a run that is killed five times and restarted on other numbers of ranks the undisturbed one?

    python benchmarks/elastic_training.py [--steps 60] [--seed 0]

Trains a small language model by `fullshard train`, once undisturbed on 2 ranks and once killed at
random (SIGKILL to every process) on 2, 3, 1, 2 and 4 ranks, and ended on 3. Compares the loss of
every step. Writes JSON to standard output.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORLDS = (2, 3, 1, 2, 4)
LAST_WORLD = 3


def command(folder, name, world, steps, *more):
    settings = [
        f"data.paths={Path(folder, 'text')}",
        f"log.folder={folder}",
        f"log.name={name}",
        f"train.steps={steps}",
        "train.batch=12",
        "model.context=16",
        "log.every=1",
        "log.sample_bytes=0",
        "optim.warmup_steps=5",
        "checkpoint.every=5",
        "train.eval_every=1000",
    ]
    return [sys.executable, "-m", "fullshard", "train", "--nproc", str(world), *settings, *more]


def losses(folder, name):
    path = Path(folder, name, "metrics.jsonl")
    if not path.exists():
        return {}
    found = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # half written
            continue
        if told["kind"] == "train":
            found[told["step"]] = told["loss"]
    return found


def run_until(folder, name, world, steps, kill_after):
    """Start or go on; kill all of it once ``kill_after`` is told. True if it was killed."""
    process = subprocess.Popen(
        command(folder, name, world, steps, "--resume"),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if kill_after is not None and max(losses(folder, name), default=0) >= kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the run failed with {process.returncode}")
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").mkdir()
        for number, source in enumerate(sorted(Path(__file__).parent.glob("*.py"))[:8]):
            shutil.copy(source, Path(folder, "text", f"{number}.txt"))
        subprocess.run(
            command(folder, "undisturbed", 2, given.steps), check=True, stdout=subprocess.DEVNULL
        )
        kills = []
        for world in WORLDS:
            reached = max(losses(folder, "killed"), default=0)
            kill_after = min(given.steps - 2, reached + draw.randint(3, given.steps // 5))
            if run_until(folder, "killed", world, given.steps, kill_after):
                kills.append({"ranks": world, "after_step": kill_after})
        run_until(folder, "killed", LAST_WORLD, given.steps, None)
        plain, killed = losses(folder, "undisturbed"), losses(folder, "killed")
    differences = {step: abs(plain[step] - killed[step]) for step in plain if step in killed}
    report = {
        "kills": kills,
        "steps_told": len(killed),
        "largest_difference": max(differences.values()),
        "last_losses": [plain[given.steps], killed[given.steps]],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
