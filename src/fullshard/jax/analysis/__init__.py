# SPDX-License-Identifier: Apache-2.0
"""What a step needs, told before and while it runs."""

__all__: list[str] = []
