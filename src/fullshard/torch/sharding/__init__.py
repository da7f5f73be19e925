# SPDX-License-Identifier: Apache-2.0
"""From a user's module to units."""
