# SPDX-License-Identifier: Apache-2.0
"""Starts or joins ranks, times the engine's collectives between them, and judges the figures."""
