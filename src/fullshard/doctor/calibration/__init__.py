# SPDX-License-Identifier: Apache-2.0
"""The machine at hand measured for the planner: ``fullshard calibrate``."""
