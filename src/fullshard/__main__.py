# SPDX-License-Identifier: Apache-2.0
"""``python -m fullshard`` is the command ``fullshard``."""

import sys

from fullshard.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
