# SPDX-License-Identifier: Apache-2.0
"""JSON files that know when they were damaged, and the values that JSON itself cannot hold."""

__all__: list[str] = []
