# SPDX-License-Identifier: Apache-2.0
"""Runs what documentation shows; importable by the processes of `support.world`."""

import warnings

import torch


def run_example(_group, page, source):
    """Run an example on a rank; it finds the default process group of the world."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch's own words about DeviceMesh and the like; fullshard's are errors
        warnings.filterwarnings("ignore", module=r"torch\.")
        exec(compile(source, page, "exec"), {"__name__": "__main__"})
