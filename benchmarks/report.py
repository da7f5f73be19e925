# SPDX-License-Identifier: Apache-2.0
"""Write what every benchmark leaves beside its table: rows, versions, commit, day and command."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def write_report(path: Path | None, rows: Any) -> None:
    """Write ``rows`` as JSON to ``path``, if there is one."""
    if path is None:
        return
    script = Path(sys.argv[0]).name
    commit = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    report = {
        "command": " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def in_own_process(script: str | Path, *arguments: object) -> Any:
    """Return what ``script --case ARGUMENTS`` prints as JSON, in a fresh process."""
    case = [sys.executable, str(script), "--case", *map(str, arguments)]
    return json.loads(subprocess.run(case, stdout=subprocess.PIPE, check=True).stdout)
