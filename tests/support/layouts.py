# SPDX-License-Identifier: Apache-2.0
"""Both layouts behind both doors: ``FULLSHARD_TEST_ALIGN=swapped`` lets each door take the other's.

Most tests say nothing of the layout, so the whole of ``tests/engine`` can be run over each.
"""

import os

from fullshard.torch import FullyShardedDataParallel, fully_shard

SWAPPED = os.environ.get("FULLSHARD_TEST_ALIGN") == "swapped"


def choose_defaults():
    if SWAPPED:
        fully_shard.__kwdefaults__["align"] = "element"
        FullyShardedDataParallel.__init__.__kwdefaults__["align"] = "row"
