# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documentation as SVG that follows light and dark.

    python docs/pictures/draw.py        write them beside this file

Each function with ``@picture`` in the files beside this one draws one. Steps are drawn from the ops
of `fullshard.core.schedule`. `tests/test_docs.py` holds that the files are what this script writes.
"""

from pathlib import Path

import steps  # noqa: F401 - each adds its pictures
import tasks  # noqa: F401
import units  # noqa: F401
from canvas import PICTURES


def main() -> None:
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
