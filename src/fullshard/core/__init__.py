# SPDX-License-Identifier: Apache-2.0
"""What is true of sharding before any framework is loaded: plain Python, standard library only."""

__all__: list[str] = []
