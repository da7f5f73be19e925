# SPDX-License-Identifier: Apache-2.0
"""Reads training scripts, without running them, and lists the mistakes that it knows."""

import tokenize
from collections.abc import Callable, Iterator, Sequence

from fullshard.core.errors import ConfigurationError
from fullshard.doctor.findings import Finding
from fullshard.doctor.scripts import checks, collectives
from fullshard.doctor.scripts.script import Script

__all__ = ["SCRIPT_CHECKS", "check_script", "check_scripts"]

SCRIPT_CHECKS: tuple[Callable[[Script], Iterator[Finding]], ...] = (
    *checks.CHECKS,
    *collectives.CHECKS,
)


def check_scripts(paths: Sequence[str]) -> list[Finding]:
    """The findings of all scripts, each in the order of its lines.

    Raises `ConfigurationError` for a path that cannot be read.
    """
    findings: list[Finding] = []
    knowing = []
    for path in paths:
        try:
            with tokenize.open(path) as file:  # in the encoding that Python would read it in
                text = file.read()
        except SyntaxError as error:
            findings.append(_unreadable(error, path))
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the script {path}: {error}") from error
        found, knows_sharding = _check(text, path)
        findings += found
        knowing.append(knows_sharding)
    if knowing and not any(knowing):
        findings.append(_nothing_of_fsdp(paths))
    return findings


def check_script(text: str, path: str = "script.py") -> list[Finding]:
    """The findings of one script's ``text``; ``path`` is the name to show."""
    found, knows_sharding = _check(text, path)
    return found if knows_sharding else [*found, _nothing_of_fsdp([path])]


def _check(text: str, path: str) -> tuple[list[Finding], bool]:
    """Its findings, and whether it has to do with sharding, for all that one can tell."""
    try:
        script = Script(text, path)
        found = [finding for check in SCRIPT_CHECKS for finding in check(script)]
    except RecursionError:
        what = "expressions or branches too deep inside each other to be followed"
        fix = "Check the script by eye, or move its largest literal or chain to a file of its own."
        means = "Nothing was looked for in this file."
        return [Finding("warning", what, means, fix, path)], True
    except (SyntaxError, ValueError) as error:
        return [_unreadable(error, path)], True
    found.sort(key=lambda finding: int(finding.where.rpartition(":")[2]))
    return found, script.knows_sharding


def _nothing_of_fsdp(paths: Sequence[str]) -> Finding:
    several = len(paths) > 1
    return Finding(
        "note",
        f"nothing of FSDP in {'these files' if several else 'this file'}",
        "If another file shards the model, mistakes around it are not seen here.",
        "Give the doctor that file too.",
        "" if several else paths[0],
    )


def _unreadable(error: SyntaxError | ValueError, path: str) -> Finding:
    what = f"this Python cannot read the script: {error}"
    line = getattr(error, "lineno", None) or 1
    return Finding("severe", what, "It does not start.", "Fix the line.", f"{path}:{line}")
