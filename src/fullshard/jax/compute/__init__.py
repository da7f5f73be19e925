# SPDX-License-Identifier: Apache-2.0
"""A loss function's trace, and what is made of it."""

__all__: list[str] = []
