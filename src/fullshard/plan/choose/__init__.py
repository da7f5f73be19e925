# SPDX-License-Identifier: Apache-2.0
"""Which configuration to take."""

__all__: list[str] = []
