# SPDX-License-Identifier: Apache-2.0
"""The part of sharding that needs no framework: plain Python on the standard library."""
