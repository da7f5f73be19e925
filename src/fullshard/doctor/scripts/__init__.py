# SPDX-License-Identifier: Apache-2.0
"""Reads training scripts without running them and lists known mistakes in their use of FSDP."""

from fullshard.doctor.scripts.linter import SCRIPT_CHECKS, check_script, check_scripts

__all__ = ["SCRIPT_CHECKS", "check_script", "check_scripts"]
