# SPDX-License-Identifier: Apache-2.0
"""The needs of a step, told before and while it runs."""

__all__: list[str] = []
