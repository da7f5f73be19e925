# SPDX-License-Identifier: Apache-2.0
"""Versions: those of torch that fullshard was tested with, and what is installed."""

import importlib.metadata

TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
"""The versions of torch with which the tests were run, oldest first: see ``docs/versions.md``."""


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
