# SPDX-License-Identifier: Apache-2.0
"""Where the tests of this folder run: on the first GPU, and as far as they mean anything there, on
the CPU too, so that their own logic is tried on every machine."""

import gc

import pytest
import torch
from gpu.training import world_of_one

NO_GPU = "needs a CUDA device, and torch sees none here"


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """A device to compute on; the test is run on each that there is."""
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    yield from _first_gpu()


@pytest.fixture
def gpu():
    """The GPU, for what a CPU has not got."""
    yield from _first_gpu()


def _first_gpu():
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    torch.cuda.init()
    torch.cuda.set_device(0)
    yield torch.device("cuda", 0)
    # A fault on the device shows when the host waits for it: let it be this test's.
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def one_rank(device, tmp_path):
    """A world of one rank, over NCCL on a GPU, whose collectives run on a stream of their own."""
    with world_of_one(device, tmp_path) as group:
        yield group


@pytest.fixture
def nccl(gpu, tmp_path):
    """The same, on a GPU only."""
    with world_of_one(gpu, tmp_path) as group:
        yield group
