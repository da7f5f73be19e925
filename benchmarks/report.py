# SPDX-License-Identifier: Apache-2.0
"""What every benchmark writes beside its table: rows, versions and the command that made them."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def write_report(path: Path | None, rows: Any) -> None:
    """Write ``rows`` as JSON to ``path``, if there is one."""
    if path is None:
        return
    script = Path(sys.argv[0]).name
    report = {
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
