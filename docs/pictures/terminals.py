# SPDX-License-Identifier: Apache-2.0
"""Run commands and draw what they print as SVG, with their colours.

    python docs/pictures/terminals.py [NAME ...]      draw into printed/: a minute

The pictures are what the commands really printed on the machine where this ran.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent / "printed"
WIDTH = 96
COMMANDS = {
    "plan": "fullshard plan llama3-8b --devices 8 --device h100",
    "plan-too-large": "fullshard plan llama3-70b --devices 8 --device a100-80gb",
    "train": "fullshard train --nproc 2 train.steps=100 checkpoint.every=50 log.folder=.",
    "checkpoints": "fullshard ckpt ls gpt-nano/checkpoints",
    "doctor": "fullshard doctor",
}


def draw(name: str, command: str, folder: str) -> None:
    program = [sys.executable, "-m", *shlex.split(command)]
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    if name != "train":  # whose display moves
        environment["FORCE_COLOR"] = "1"
    done = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    printed = (done.stdout + done.stderr).replace(folder, "/home/you/work")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(f"$ {command}\n{printed.rstrip()}"))
    svg = console.export_svg(title="", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no fonts from a network
    svg = svg.replace("Fira Code, monospace", "ui-monospace, monospace")
    (FOLDER / f"{name}.svg").write_text(svg, "utf-8")
    print(f"{name}.svg: exit status {done.returncode}")


def main() -> None:
    chosen = sys.argv[1:] or list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            draw(name, COMMANDS[name], folder)


if __name__ == "__main__":
    main()
