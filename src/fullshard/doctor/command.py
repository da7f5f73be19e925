# SPDX-License-Identifier: Apache-2.0
"""``fullshard doctor``: looks at this machine, the links between ranks, and scripts."""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

from fullshard.core.errors import CommunicationError, ConfigurationError
from fullshard.core.text import HelpFormatter
from fullshard.distributed import default_nproc
from fullshard.doctor.findings import Finding
from fullshard.doctor.links import SIZES_BYTES, check_links, joined, measure_links, measure_locally
from fullshard.doctor.machine.checks import check_machine
from fullshard.doctor.machine.snapshot import Machine, facts, read_machine
from fullshard.doctor.output import Report, print_report, to_json
from fullshard.doctor.scripts import check_scripts
from fullshard.launchers import (
    check_nproc,
    launcher_environment,
    local_rank_of,
    rank_of,
    threads_per_rank,
)
from fullshard.torch.comm.texts import share_bytes

_MOST_BYTES = 16 << 30  # of a measured buffer

_EXAMPLES = """\
examples:
  fullshard doctor                                  this machine, and 2 ranks (or one per GPU)
  fullshard doctor train.py --no-links              read a script too, measure nothing
  fullshard doctor --nproc 4 --size 1MiB --size 64MiB
  torchrun --nnodes 2 --nproc-per-node 8 ... -m fullshard doctor     between hosts
  srun fullshard doctor --json

exit status: 0, or 1 after a severe finding: training would fail, hang, or
learn something else than intended; 2 for invalid arguments
"""


def main(argv: Sequence[str]) -> int:
    """Run ``fullshard doctor``; returns the exit status. Collective where a launcher started it.

    Raises `ConfigurationError` for invalid arguments, before anything is started.
    """
    arguments = _parser().parse_args(argv)
    sizes_bytes = [parse_size(text) for text in arguments.size or ()] or list(SIZES_BYTES)
    launcher = _launched(arguments.nproc)
    # Read before ranks are started, so that a wrong path is reported at once.
    findings = check_scripts(arguments.scripts) if rank_of(os.environ) == 0 else []
    if launcher is not None:
        os.environ.update(launcher)
        report, status = _among_launched(arguments.links, sizes_bytes)
    else:
        report, status = _alone(arguments.nproc, arguments.links, sizes_bytes), 0
    if report is None:
        return status
    whole = dataclasses.replace(report, findings=[*report.findings, *findings])
    if arguments.json:
        print(to_json(whole))
    else:
        print_report(whole)
    return int(whole.is_bad)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullshard doctor",
        description="Check this machine, measure the links between ranks and read scripts. Report "
        "what would go wrong in training, with a fix for each finding. Scripts are never run.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT.py", help="training scripts to read")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks to start here for the links (default: one per GPU; 2 without a GPU); not for "
        "torchrun and srun, which start them themselves",
    )
    parser.add_argument(
        "--size",
        action="append",
        metavar="BYTES",
        help="a size of buffer to measure, such as 256KiB or 16MiB; may be repeated "
        "(default: 64KiB to 64MiB)",
    )
    parser.add_argument(
        "--no-links", dest="links", action="store_false", help="do not measure the links"
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object instead")
    return parser


def parse_size(text: str) -> int:
    """Return bytes of a text such as ``4MiB``, ``64k`` or ``1048576``; units are powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(i?b)?", text.strip().lower())
    digits = match[1] if match and len(match[1]) < 20 else "0"
    size_bytes = int(digits) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]] if match else 0
    if not 4 <= size_bytes <= _MOST_BYTES:
        raise ConfigurationError(
            "--size must be at least 4 bytes and at most 16 GiB, as in 256KiB or 16MiB, "
            f"got {text!r}"
        )
    return size_bytes


def _launched(nproc: int | None) -> Mapping[str, str] | None:
    """Return the variables to add to the environment to join launched ranks; None without any."""
    try:
        launcher_environment(os.environ)
    except ValueError:
        return None  # the environment contradicts itself, which is one of the findings
    return launcher_environment(os.environ, local_only=nproc is not None)


def _alone(nproc: int | None, with_links: bool, sizes_bytes: Sequence[int]) -> Report:
    ranks = check_nproc(nproc) if nproc is not None else default_nproc()
    machine = read_machine(ranks, ranks, os.environ)
    report = _of_host(machine)
    if not with_links or ranks < 2:
        return report
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdigit() else threads_per_rank(ranks, machine.cores)
    try:
        links = measure_locally(ranks, sizes_bytes, threads)
    except CommunicationError as error:
        return dataclasses.replace(report, findings=[*report.findings, _broken(error)])
    return Report(report.facts, [*report.findings, *check_links(links)], links)


def _of_host(machine: Machine) -> Report:
    return Report({machine.hostname: facts(machine)}, check_machine(machine))


def _among_launched(with_links: bool, sizes_bytes: Sequence[int]) -> tuple[Report | None, int]:
    """Rank 0's report, which the first rank of each host adds to; None on all others."""
    rank, size = rank_of(os.environ), int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    own = Report({}, [])
    if local_rank_of(os.environ) in (0, None):
        own = _of_host(read_machine(local_ranks, size, os.environ))
    if not with_links:
        return (own if rank == 0 else None), 0
    try:
        with joined() as (comm, device, backend):
            reports = share_bytes(comm, to_json(own).encode(), device)
            texts = [report.decode() for report in reports]
            links = measure_links(comm, device, backend, sizes_bytes) if size > 1 else None
    except CommunicationError as error:
        if rank == 0:
            return Report(own.facts, [*own.findings, _broken(error)]), 1
        print(f"fullshard doctor: {error}", file=sys.stderr)
        return None, 1
    if rank != 0:
        return None, 0
    facts_of, findings = check_hosts(texts)
    if links is not None:
        findings += check_links(links)
    return Report(facts_of, findings, links), 0


def check_hosts(texts: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """Return the facts and findings of all ranks' reports (`to_json`), and where hosts differ."""
    facts_of: dict[str, dict[str, str]] = {}
    findings: list[Finding] = []
    for text in texts:
        read = json.loads(text)
        facts_of |= read["facts"]
        host = next(iter(read["facts"]), "")
        findings += [Finding(**{**each, "where": host}) for each in read["findings"]]
    for name in ("torch", "fullshard", "NCCL", "python"):
        versions = {host: known.get(name, "none") for host, known in facts_of.items()}
        if len(set(versions.values())) > 1:
            findings.append(
                Finding(
                    "severe",
                    f"hosts have different versions of {name}: "
                    + ", ".join(f"{host} {version}" for host, version in versions.items()),
                    "Ranks that run different code disagree on what they send each other.",
                    "Start all hosts from one environment or container image.",
                )
            )
    return facts_of, findings


def _broken(error: CommunicationError) -> Finding:
    first_line, _, others = str(error).partition("\n")
    return Finding(
        "severe",
        "the ranks could not exchange data",
        " ".join([first_line, *others.split()]),
        "See the findings about names, interfaces and limits; NCCL_DEBUG=INFO or "
        "TORCH_CPP_LOG_LEVEL=INFO tell more.",
    )
