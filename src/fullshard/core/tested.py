# SPDX-License-Identifier: Apache-2.0
"""The versions of torch that fullshard was tested with."""

__all__ = ["TESTED_TORCH"]

TESTED_TORCH = ("2.11.0", "2.12.1", "2.13.0", "2.14.1")
"""The versions of torch with which the tests were run, oldest first: see ``docs/versions.md``."""
