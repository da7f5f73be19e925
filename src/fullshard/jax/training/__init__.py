# SPDX-License-Identifier: Apache-2.0
"""The train step, its state and its options."""

__all__: list[str] = []
