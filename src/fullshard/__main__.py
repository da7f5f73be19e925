# SPDX-License-Identifier: Apache-2.0
"""``python -m fullshard`` is the command ``fullshard``."""

import sys

from fullshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
