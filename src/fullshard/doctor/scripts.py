# SPDX-License-Identifier: Apache-2.0
"""Reads training scripts, without running them, and lists the mistakes that it knows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fullshard.core.errors import ConfigurationError
from fullshard.doctor.collective_checks import collectives_on_some_ranks, parts_saved_as_whole
from fullshard.doctor.findings import Finding
from fullshard.doctor.script import Script
from fullshard.doctor.script_checks import (
    data_not_shared_out,
    foreign_names,
    forward_bypassed,
    moved_whole,
    optimizer_before_sharding,
    sampler_without_epoch,
    unsafe_load,
)

__all__ = ["SCRIPT_CHECKS", "check_script", "check_scripts"]

SCRIPT_CHECKS: tuple[Callable[[Script], Iterator[Finding]], ...] = (
    optimizer_before_sharding,
    moved_whole,
    collectives_on_some_ranks,
    parts_saved_as_whole,
    forward_bypassed,
    sampler_without_epoch,
    data_not_shared_out,
    unsafe_load,
    foreign_names,
)


def check_scripts(paths: Sequence[str]) -> list[Finding]:
    """The findings of all scripts, each in the order of its lines.

    Raises `ConfigurationError` for a path that cannot be read.
    """
    findings = []
    for path in paths:
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the script {path}: {error}") from error
        findings += check_script(text, path)
    return findings


def check_script(text: str, path: str = "script.py") -> list[Finding]:
    """The findings of one script's ``text``; ``path`` is the name to show."""
    try:
        script = Script(text, path)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        what = f"this Python cannot read the script: {error}"
        means = "It does not start."
        return [Finding("severe", what, means, "Mend the line.", f"{path}:{line}")]
    found = [finding for check in SCRIPT_CHECKS for finding in check(script)]
    found.sort(key=lambda finding: int(finding.where.rpartition(":")[2]))
    if not script.knows_sharding:
        found.append(
            Finding(
                "note",
                "nothing of FSDP in this file",
                "If another file shards the model, mistakes around it are not seen here.",
                "Give the doctor that file too.",
                path,
            )
        )
    return found
