# SPDX-License-Identifier: Apache-2.0
"""One unit of parameters: resting, full, reduced."""

__all__: list[str] = []
