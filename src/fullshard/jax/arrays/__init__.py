# SPDX-License-Identifier: Apache-2.0
"""Meshes, and how arrays lie on them."""

__all__: list[str] = []
