# SPDX-License-Identifier: Apache-2.0
"""How chunks get from files into memory: which thread reads what, and what is copied where."""

__all__: list[str] = []
