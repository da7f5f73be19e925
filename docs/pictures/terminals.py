# SPDX-License-Identifier: Apache-2.0
"""Run commands and draw what they print as SVG, with their colours.

    python docs/pictures/terminals.py [NAME ...]      draw into printed/: some minutes

The pictures are what the commands really printed on the machine where this ran. Of a session's
commands the first lines are kept; three dots stand for the others. "checkpoints" and "report" show
what "train" has left: name it, too. "plan" also keeps two pictures that it draws, in plotted/.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent / "printed"
PLOTTED = FOLDER.with_name("plotted")
WIDTH = 96
COMMANDS = {
    "plan": "fullshard plan llama3-8b --devices 8 --device h100 --draw pictures",
    "plan-too-large": "fullshard plan llama3-70b --devices 8 --device a100-80gb",
    "train": "fullshard train --nproc 2 train.steps=100 checkpoint.every=50 log.folder=.",
    "checkpoints": "fullshard ckpt ls gpt-nano/checkpoints",
    "report": "fullshard report gpt-nano",
    "doctor": "fullshard doctor",
    "doctor-script": "fullshard doctor train.py --no-links",
    "prove": "fullshard prove --fast --only losses --out proof",
}
# Commands in turn, with how many lines of each are shown.
SESSION = (
    ("fullshard plan llama3-8b --devices 8 --device h100", 12),
    ("fullshard train --nproc 2 train.steps=40 checkpoint.every=20", 9),
    ("fullshard ckpt ls runs/gpt-nano/checkpoints", 3),
    ("fullshard report runs/gpt-nano", 8),
)
SCRIPT = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
fully_shard(model)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
"""


def printed_by(command: str, folder: str, *, colours: bool) -> str:
    """Run a command in ``folder``; return what it prints, with a path of nobody's in its place."""
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    if colours:
        environment["FORCE_COLOR"] = "1"
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    print(f"{command}: exit status {done.returncode}")
    said = (done.stdout + done.stderr).replace(folder, "/home/you/work").rstrip()
    return said.replace(platform.release(), platform.release().partition("-")[0])


def write(name: str, text: str, *, line_by_line: bool = False) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(text))
    svg = console.export_svg(title="", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # no fonts from a network
    svg = svg.replace("Fira Code, monospace", "ui-monospace, monospace")
    if line_by_line:
        svg = svg.replace("</style>", f"{appearing(name, text)}</style>", 1)
    (FOLDER / f"{name}.svg").write_text(svg, "utf-8")


def appearing(name: str, text: str) -> str:
    """Return a style with which a line appears after the other, and commands after a pause."""
    rules, at = ["@keyframes appear { from { opacity: 0 } }"], 0.0
    for number, line in enumerate(text.splitlines()):
        at += 1.2 if line.startswith("$ ") and number else 0.15
        place = f'text[clip-path="url(#{name}-line-{number})"]'
        rules.append(f"{place} {{ animation: appear 1ms {at:.2f}s both }}")
    return "@media (prefers-reduced-motion: no-preference) { " + "\n".join(rules) + " }"


def record_session(folder: str) -> None:
    shown = []
    for command, most in SESSION:
        lines = printed_by(command, folder, colours=False).splitlines()
        wrapped = [line[:WIDTH] for line in lines]
        shown += [f"$ {command}", *wrapped[:most], *(["..."] if len(lines) > most else []), ""]
    write("session", "\n".join(shown).rstrip(), line_by_line=True)


def main() -> None:
    chosen = sys.argv[1:] or [*COMMANDS, "session"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        for name in chosen:
            if name == "session":
                record_session(folder)
            else:
                # The displays of these two move where there are colours.
                still = name in ("train", "prove")
                said = printed_by(COMMANDS[name], folder, colours=not still)
                write(name, f"$ {COMMANDS[name]}\n{said}")
        for drawn in ("memory", "streams") if "plan" in chosen else ():
            shutil.copy(Path(folder, "pictures", f"{drawn}.svg"), PLOTTED / f"plan-{drawn}.svg")


if __name__ == "__main__":
    main()
