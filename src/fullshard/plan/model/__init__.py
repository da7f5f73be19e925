# SPDX-License-Identifier: Apache-2.0
"""Models told without a framework: parameters and work."""
