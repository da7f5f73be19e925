# SPDX-License-Identifier: Apache-2.0
"""The command ``fullshard calibrate``: measures, prints, writes a device file for the planner."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fullshard.core.errors import ConfigurationError, check_new
from fullshard.core.text import write_whole
from fullshard.distributed import get_device
from fullshard.doctor.calibration.measure import calibrate
from fullshard.doctor.links.ranks import joined
from fullshard.launchers import check_nproc, launcher_environment
from fullshard.local_ranks import run_local_ranks
from fullshard.plan.cluster.cluster import Device
from fullshard.plan.record import corrected, device_toml, read_record


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="fullshard calibrate",
        description="Measure this machine's device and links in about a minute and write what "
        "fullshard plan --device FILE.toml reads. Under torchrun or srun all ranks take part. With "
        "--record nothing is measured: a finished run's tokens/s and memory correct its device.",
    )
    parser.add_argument("--out", type=Path, default=Path("calibration.toml"), metavar="FILE.toml")
    parser.add_argument("--record", type=Path, metavar="RUN.toml", help="of a finished run")
    parser.add_argument("--nproc", type=int, default=1, help="ranks to start on this machine")
    parser.add_argument("--threads", type=int, default=0, help="of each rank on a CPU")
    arguments = parser.parse_args(argv)
    check_nproc(arguments.nproc)
    if not 0 <= arguments.threads <= 4096:
        raise ConfigurationError(
            f"--threads must be 0 (torch's choice) to 4096, got {arguments.threads}"
        )
    target: Path = arguments.out
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--out must be a file in a folder that is there, got {arguments.out}"
        )
    check_new("--out", target)
    text: str | None
    environment = launcher_environment(os.environ)
    if arguments.record is not None:
        text = device_toml(
            corrected(read_record(arguments.record)), f"corrected by {arguments.record.name}"
        )
    elif environment is not None:
        os.environ.update(environment)
        text = _measured(arguments.threads)
    elif arguments.nproc > 1:
        text = run_local_ranks(_measured, (arguments.threads,), arguments.nproc, 300.0)
    else:
        _set_threads(arguments.threads)
        text = _described(calibrate(get_device()))
    if text is not None:
        write_whole(target, text)
        print(f"{text}\nwritten to {target}: fullshard plan MODEL --device {target}")
    return 0


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def _measured(threads: int) -> str | None:
    """Measure on all ranks together; None on all but the first."""
    _set_threads(threads)
    with joined() as (comm, device, backend):
        measured = calibrate(device, comm, backend)
        return _described(measured) if comm.rank == 0 else None


def _described(device: Device) -> str:
    return device_toml(device, device.origin)
