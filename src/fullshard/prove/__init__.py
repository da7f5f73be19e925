# SPDX-License-Identifier: Apache-2.0
"""``fullshard prove``: losses, memory and order of the engine, tried where it is called."""

from fullshard.prove.command import main

__all__ = ["main"]
