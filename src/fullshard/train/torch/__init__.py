# SPDX-License-Identifier: Apache-2.0
"""Runs `fullshard train` on the torch engine: ranks, models, the training loop, its closing."""
