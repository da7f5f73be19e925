# SPDX-License-Identifier: Apache-2.0
"""`python -m device programs`, `mutants`, `cost`, `orders`, `memory` or `sample`: lines of JSON.

`table` makes the table of costs in `docs/performance.md`.
"""

import sys

from device import guard

guard.load()

from device.runner import main  # noqa: E402 - torch is imported after the guard

if __name__ == "__main__":
    main(sys.argv[1])
