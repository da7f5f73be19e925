# SPDX-License-Identifier: Apache-2.0
"""Sharded values in the forms that others want them in."""
