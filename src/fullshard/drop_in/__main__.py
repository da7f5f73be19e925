# SPDX-License-Identifier: Apache-2.0
"""``python -m fullshard.drop_in script.py [args]``: run a script on fullshard, in this process."""

import sys

from fullshard.drop_in.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
