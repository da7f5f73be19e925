# SPDX-License-Identifier: Apache-2.0
"""Choices among configurations."""
