# SPDX-License-Identifier: Apache-2.0
"""Weights and states in files."""

__all__: list[str] = []
