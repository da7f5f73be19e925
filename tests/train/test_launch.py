# SPDX-License-Identifier: Apache-2.0
from fullshard.train.launch import threads_per_rank


def test_threads_share_the_cores():
    assert [threads_per_rank(nproc, 8) for nproc in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
