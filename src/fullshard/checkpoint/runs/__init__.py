# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its steps, which of them stay, who uses it."""
