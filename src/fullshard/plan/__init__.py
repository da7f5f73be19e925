# SPDX-License-Identifier: Apache-2.0
"""What a training run will need and how long it will take, before anything is launched."""

__all__: list[str] = []
