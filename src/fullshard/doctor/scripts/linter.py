# SPDX-License-Identifier: Apache-2.0
"""Reads training scripts, without running them, and lists the mistakes that it knows."""

import tokenize
from collections.abc import Callable, Iterator, Sequence

from fullshard.core.errors import ConfigurationError
from fullshard.doctor.findings import Finding
from fullshard.doctor.scripts.checks import (
    data_not_shared_out,
    foreign_names,
    forward_bypassed,
    moved_whole,
    optimizer_before_sharding,
    sampler_without_epoch,
    unsafe_load,
)
from fullshard.doctor.scripts.collectives import collectives_on_some_ranks, parts_saved_as_whole
from fullshard.doctor.scripts.script import Script

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
            with tokenize.open(path) as file:  # in the encoding that Python would read it in
                text = file.read()
        except SyntaxError as error:
            findings.append(_unreadable(error, path))
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the script {path}: {error}") from error
        findings += check_script(text, path)
    return findings


def check_script(text: str, path: str = "script.py") -> list[Finding]:
    """The findings of one script's ``text``; ``path`` is the name to show."""
    try:
        script = Script(text, path)
        found = [finding for check in SCRIPT_CHECKS for finding in check(script)]
    except RecursionError:
        what = "expressions or branches too deep inside each other to be followed"
        mend = "Check the script by eye, or move its largest literal or chain to a file of its own."
        return [Finding("warning", what, "Nothing was looked for in this file.", mend, path)]
    except (SyntaxError, ValueError) as error:
        return [_unreadable(error, path)]
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


def _unreadable(error: SyntaxError | ValueError, path: str) -> Finding:
    what = f"this Python cannot read the script: {error}"
    line = getattr(error, "lineno", None) or 1
    return Finding("severe", what, "It does not start.", "Mend the line.", f"{path}:{line}")
