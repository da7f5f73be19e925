# SPDX-License-Identifier: Apache-2.0
"""The command ``fullshard plan``."""

__all__: list[str] = []
