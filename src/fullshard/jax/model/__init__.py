# SPDX-License-Identifier: Apache-2.0
"""Models as the engine reads them."""

__all__: list[str] = []
