# SPDX-License-Identifier: Apache-2.0
"""What happens when, over one training step."""

__all__: list[str] = []
