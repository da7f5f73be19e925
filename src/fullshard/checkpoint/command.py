# SPDX-License-Identifier: Apache-2.0
"""``fullshard ckpt``: look at checkpoints, verify, seal, compare, rewrite them."""

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fullshard.checkpoint import (
    Checkpoint,
    CheckpointError,
    Files,
    StepFolder,
    check_seal,
    compare,
    export_safetensors,
    import_safetensors,
    is_sealed,
    open_checkpoint,
    reshard_checkpoint,
    seal,
    steps_in,
)
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.runs.commit import is_verified, told_below
from fullshard.core.errors import ConfigurationError, check_new
from fullshard.core.text import HelpFormatter, bytes_text

_EXAMPLES = """\
examples:
  fullshard ckpt ls runs/gpt-nano/checkpoints
  fullshard ckpt verify runs/gpt-nano/checkpoints          the newest step, every byte
  fullshard ckpt seal their_checkpoint                     of DCP, Orbax, Hugging Face, anything
  fullshard ckpt verify their_checkpoint                   what is sealed
  fullshard ckpt diff run_a run_b --step 100
  fullshard ckpt reshard run run_for_16 --world 16
  fullshard ckpt export run weights.safetensors
  fullshard ckpt export run folder --format dcp            optimizer included; needs torch
  fullshard ckpt import hf_folder run --step 0

PATH is a run folder, of which the newest step is taken or --step, or the
folder of one step.

exit status: 0, 1 if something is damaged or differs, 2 for what cannot be asked.
"""

Advance = Callable[[int], None]


def main(argv: Sequence[str]) -> int:
    """Run ``fullshard ckpt``; returns the exit status. Raises `CheckpointError` for damage."""
    arguments = _parser().parse_args(argv)
    status: int = arguments.run(arguments)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fullshard ckpt",
        description="Work on checkpoints, on one machine; without torch, but for --format dcp.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    step: dict[str, Any] = {"type": _step, "metavar": "N", "help": "this step, not the newest"}

    def command(run: Any, name: str, text: str, *paths: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        for path in paths:
            made.add_argument(path, type=Path)
        made.set_defaults(run=run)
        return made

    command(_list, "ls", "list the complete steps of a run", "path")
    verify = command(_verify, "verify", "read every byte and check it against its checksum", "path")
    verify.add_argument("--step", **step)
    verify.add_argument("--all", action="store_true", help="all steps of the run")
    command(_seal, "seal", "write checksums beside a checkpoint of any library", "path")
    diff = command(_diff, "diff", "tell in what two checkpoints differ", "a", "b")
    diff.add_argument("--step", **step)
    reshard = command(_reshard, "reshard", "write a step as N ranks would", "source", "run_folder")
    reshard.add_argument("--world", type=int, required=True, metavar="N", help="ranks")
    reshard.add_argument("--step", **step)
    export = command(_export, "export", "write a step in another format", "source", "target")
    export.add_argument("--format", choices=["safetensors", "dcp"], default="safetensors")
    export.add_argument("--part", default="model", help="which model (default: model)")
    export.add_argument(
        "--file-bytes", type=int, default=5 * 10**9, help="size of a file in a folder (5000000000)"
    )
    export.add_argument("--step", **step)
    bring = command(_import, "import", "make a step out of another format", "source", "run_folder")
    bring.add_argument("--format", choices=["safetensors", "dcp"], help="default: looked up")
    bring.add_argument("--part", default="model", help="the model's name (default: model)")
    bring.add_argument("--step", type=_step, default=0, metavar="N", help="its step (default: 0)")
    return parser


def _step(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"a step is a number from 0, got {text!r}")
    return int(text)


def _list(arguments: argparse.Namespace) -> int:
    path: Path = arguments.path
    steps = steps_in(Files(), path)
    if not steps and (path / MANIFEST).is_file():  # a step's own folder
        steps = [StepFolder(0, 1, path)]
    if not path.exists():
        raise ConfigurationError(f"there is no folder {path}")
    if not steps:
        raise ConfigurationError(f"{path} holds no complete step{told_below(Files(), path)}")
    damaged = 0
    kept = next((step for step in reversed(steps) if is_verified(Files(), step.path)), None)
    for folder in steps:
        try:
            checkpoint = Checkpoint(folder.path)
        except CheckpointError as error:
            print(f"{folder.path.name}  damaged: {error}")
            damaged = 1
            continue
        manifest = checkpoint.manifest
        mark = "verified" if checkpoint.is_verified else ""
        if folder is kept:
            mark = "verified: the newest one stays, whatever Keep says"
        print(
            f"{folder.path.name}  {bytes_text(manifest.size_bytes):>10}  "
            f"{len(manifest.tensors):5} tensors  {len(manifest.files):3} files  "
            f"{manifest.saved_at}  {manifest.layout}  {mark}".rstrip()
        )
    for aside in sorted(path.glob("aside-*")):
        numbers = ", ".join(str(step.step) for step in steps_in(Files(), aside))
        print(f"{aside.name}  moved aside: steps {numbers}" if numbers else aside.name)
    return damaged


def _verify(arguments: argparse.Namespace) -> int:
    path = arguments.path
    sealed = is_sealed(path)
    if sealed:
        with _progress("verifying", None) as advance:
            report = check_seal(path, advance)
        print(f"{path}: {report.file_count} sealed files, {bytes_text(report.size_bytes)}: right")
        for name in report.unsealed:
            print(f"  not sealed: {name}")
        ours = path.is_dir() and (steps_in(Files(), path) or (path / MANIFEST).is_file())
        if not ours and arguments.step is None and not arguments.all:
            return 0
    checkpoints = [open_checkpoint(path, arguments.step)]
    if arguments.all:
        checkpoints = [Checkpoint(step.path) for step in steps_in(Files(), path)] or checkpoints
    for checkpoint in checkpoints:
        size_bytes = checkpoint.manifest.size_bytes
        with _progress("verifying", size_bytes) as advance:
            checkpoint.verify(advance)
        print(f"{checkpoint.folder}: {bytes_text(size_bytes)}: right")
    return 0


def _seal(arguments: argparse.Namespace) -> int:
    with _progress("sealing", None) as advance:
        report = seal(arguments.path, advance)
    print(f"{report.path}: {report.file_count} files, {bytes_text(report.size_bytes)}")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    a, b = (open_checkpoint(path, arguments.step) for path in (arguments.a, arguments.b))
    total = sum(tensor.size_bytes for tensor in a.manifest.tensors.values())
    with _progress("comparing", total) as advance:
        differences = list(compare(a, b, advance))
    for each in differences:
        print(f"{each.tensor}: {each.what}" if each.tensor else each.what)
    print(f"{len(differences)} differences" if differences else "equal")
    return 1 if differences else 0


def _reshard(arguments: argparse.Namespace) -> int:
    source = open_checkpoint(arguments.source, arguments.step)
    with _progress("writing", source.manifest.size_bytes) as advance:
        print(reshard_checkpoint(source, arguments.run_folder, arguments.world, advance))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    check_new("the target", arguments.target)
    if arguments.format == "dcp":
        dcp = _dcp()
        print(dcp.export_dcp(open_checkpoint(arguments.source, arguments.step), arguments.target))
        return 0
    source = open_checkpoint(arguments.source, arguments.step)
    with _progress("writing", None) as advance:
        files = export_safetensors(
            source, arguments.target, arguments.part, arguments.file_bytes, advance
        )
    for file in files:
        print(file)
    return 0


def _import(arguments: argparse.Namespace) -> int:
    given = arguments.format or ("dcp" if (arguments.source / ".metadata").is_file() else "")
    if given == "dcp":
        print(_dcp().import_dcp(arguments.source, arguments.run_folder, arguments.step))
        return 0
    print(
        import_safetensors(arguments.source, arguments.run_folder, arguments.step, arguments.part)
    )
    return 0


def _dcp() -> Any:
    try:
        return importlib.import_module("fullshard.torch.checkpoint.dcp")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--format dcp needs torch ({error.name} is missing): pip install -e '.[torch]'"
        ) from error


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Advance]:
    """A bar of bytes on a terminal, where rich is installed; any thread may advance it."""
    console: Any = None
    with suppress(ModuleNotFoundError):
        progress: Any = importlib.import_module("rich.progress")
        console = progress.Console(stderr=True)
    if console is None or not console.is_terminal:
        yield lambda count: None
        return
    columns = [
        "[bold]{task.description}",
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
