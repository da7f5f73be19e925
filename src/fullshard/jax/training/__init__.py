# SPDX-License-Identifier: Apache-2.0
"""X."""

__all__: list[str] = []
