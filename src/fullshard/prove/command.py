# SPDX-License-Identifier: Apache-2.0
"""``fullshard prove``: tries the claims about the engine here, and writes a page about it."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.core.text import HelpFormatter
from fullshard.prove.claims import Claim, Section
from fullshard.prove.losses import prove_losses
from fullshard.prove.memory import Scene, prove_memory
from fullshard.prove.page import Proof, print_proof, write_proof
from fullshard.prove.provenance import provenance
from fullshard.prove.simulation import prove_order

_EPILOG = """\
sections:
  losses   losses and weights of several engines on local ranks, bit by bit where they can be
  memory   bytes of one rank, at rest and at the peaks of a step
  order    races on a simulated device, deliberate faults; from a source checkout only

exit status: 0 if no claim fails, 1 if one does, 2 for invalid arguments
"""


@dataclass(frozen=True)
class Scale:
    """The extent of a proof: ``timeout_s`` bounds each section."""

    steps: int
    scene: Scene
    kinds: tuple[str, ...]
    timeout_s: float


FULL = Scale(40, Scene(64, 8, 1024), ("programs", "mutants"), 3600.0)
FAST = Scale(6, Scene(8, 4, 256), ("sample",), 1200.0)

_SECTIONS: dict[str, Callable[[Scale], Section]] = {
    "losses": lambda scale: prove_losses(scale.steps, scale.timeout_s),
    "memory": lambda scale: prove_memory(scale.scene, scale.timeout_s),
    "order": lambda scale: prove_order(scale.kinds, scale.timeout_s),
}


def main(argv: Sequence[str]) -> int:
    """Run ``fullshard prove``; return the exit status, 1 if a claim fails."""
    parser = argparse.ArgumentParser(
        prog="fullshard prove",
        description="Try what fullshard claims, on this machine and without a GPU: losses beside "
        "PyTorch's DDP and FSDP2, memory beside FSDP2, races and deliberate faults on a simulated "
        "device. Writes a page (HTML and JSON) that names the commit and the versions. All of it "
        "takes a quarter of an hour or more on two cores.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--fast", action="store_true", help="a sample of it, in a few minutes")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(_SECTIONS),
        help="try this section alone; may be given again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/proof"),
        metavar="FOLDER",
        help="where proof.html and proof.json go (default runs/proof)",
    )
    options = parser.parse_args(argv)
    if options.out.exists() and not options.out.is_dir():
        raise ConfigurationError(f"--out must be a folder, but {options.out} is a file")
    console, begin_s = Console(), time.monotonic()
    bound_to = provenance(" ".join(["fullshard prove", *argv]))  # as it is when the runs begin
    sections = []
    for name in options.only or _SECTIONS:
        if not console.is_terminal:  # where a status shows nothing
            console.print(f"trying {name} ...")
        with console.status(f"trying {name} ..."):
            sections.append(_tried(name, FAST if options.fast else FULL))
    skipped = tuple(name for name in _SECTIONS if options.only and name not in options.only)
    proof = Proof(bound_to, tuple(sections), time.monotonic() - begin_s, skipped)
    print_proof(proof, console)
    page, data = write_proof(proof, options.out)
    console.print(f"{proof.verdict}{proof.without}: {page} and {data}", highlight=False)
    return int(proof.verdict == "fails")


def _tried(name: str, scale: Scale) -> Section:
    """Run one section; what ends it is a claim that fails."""
    try:
        return _SECTIONS[name](scale)
    except FullshardError as error:
        claim = Claim("it can be tried", "fails", str(error))
        return Section(name, "An error ended this section.", (claim,))
