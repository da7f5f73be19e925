# SPDX-License-Identifier: Apache-2.0
"""One training step: its units, its script, its time."""
