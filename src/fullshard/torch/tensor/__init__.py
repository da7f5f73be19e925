# SPDX-License-Identifier: Apache-2.0
"""What a sharded parameter is and does."""

__all__: list[str] = []
