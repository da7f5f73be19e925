# SPDX-License-Identifier: Apache-2.0
"""The page of a proof, as HTML for people and JSON for machines, and the table in the terminal."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fullshard.core.text import write_whole
from fullshard.prove.claims import Section, Verdict, verdict_of
from fullshard.prove.provenance import Provenance

NOT_PROVED = (
    "Nothing here ran on a GPU: not NCCL, not CUDA's streams, no kernel of a device. The check of "
    "their order is a simulation.",
    "Speed: no time was measured. docs/performance.md has what was measured, and on what.",
    "Several hosts: all ranks ran on this machine, over its loopback interface.",
    "Large models: losses are those of a small GPT. What a step does to a unit does not depend on "
    "its size, but memory of activations and workspaces does.",
    "Other libraries: torch.compile, tensor parallelism, checkpoints and loss scaling have tests, "
    "and no part in this.",
)

_COLOURS: dict[Verdict, str] = {"holds": "green", "fails": "bold red", "not proved": "yellow"}


@dataclass(frozen=True)
class Proof:
    """All sections, those ``skipped``, and what they are bound to; ``took_s`` is of the whole."""

    bound_to: Provenance
    sections: tuple[Section, ...]
    took_s: float
    skipped: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict over all sections."""
        return verdict_of(self.sections)

    @property
    def without(self) -> str:
        """Words after the verdict in the heading: the sections that were not tried."""
        return f" (not tried: {', '.join(self.skipped)})" if self.skipped else ""


def write_proof(proof: Proof, folder: Path) -> tuple[Path, Path]:
    """Write ``proof.html`` and ``proof.json`` into ``folder``, made if need be; return both."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "proof.html", folder / "proof.json"
    write_whole(paths[0], _html(proof))
    whole = {"verdict": proof.verdict, **asdict(proof), "not_proved": NOT_PROVED}
    write_whole(paths[1], json.dumps(whole, indent=1) + "\n")
    return paths


def _html(proof: Proof) -> str:
    environment = Environment(
        loader=PackageLoader("fullshard.prove", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        verdict=proof.verdict,
        without=proof.without,
        bound_to=list(_bound_to(proof)),
        sections=proof.sections,
        not_proved=NOT_PROVED,
    )


def _bound_to(proof: Proof) -> Iterator[tuple[str, str]]:
    found = proof.bound_to
    changed = f" and changes in {', '.join(found.dirty)}" if found.dirty else ", no changes"
    yield "commit", "none: not a checkout" if found.commit is None else found.commit + changed
    yield "source", f"SHA-256 {found.source_sha256}"
    yield "versions", ", ".join(f"{name} {number}" for name, number in found.versions.items())
    yield "Python", found.python
    yield "machine", f"{found.system}, {found.cores} cores, GPU: {found.gpu}"
    yield "command", found.command
    yield "made", f"{found.made_at}, in {proof.took_s:.0f} s"


def print_proof(proof: Proof, console: Console) -> None:
    """Print all claims as one table for each section, and what the proof is bound to."""
    for section in proof.sections:
        table = Table("claim", "verdict", "found", "held against", title_justify="left")
        table.title = section.title
        for claim in section.claims:
            verdict = Text(claim.verdict, _COLOURS[claim.verdict])
            table.add_row(Text(claim.what), verdict, Text(claim.figure), Text(claim.bound))
        console.print(table)
    grid = Table.grid(padding=(0, 2))
    for name, value in _bound_to(proof):
        grid.add_row(Text(name, "dim"), Text(value))
    console.print(grid)
