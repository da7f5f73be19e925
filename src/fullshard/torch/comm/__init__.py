# SPDX-License-Identifier: Apache-2.0
"""Ranks, and what they send each other."""
