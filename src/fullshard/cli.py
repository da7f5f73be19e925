# SPDX-License-Identifier: Apache-2.0
"""The command ``fullshard``: parses, then delegates. Loads torch or jax when it starts to work."""

import argparse
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fullshard.core.errors import ConfigurationError, FullshardError
from fullshard.core.tested import installed_version
from fullshard.core.text import HelpFormatter
from fullshard.train.signals import leaving_at_once

_TRAIN_EXAMPLES = """\
examples:
  fullshard train                                  a byte-level language model, a few minutes
  fullshard train --model mnist                    a small convolution net that reads digits
  fullshard train --model moe                      experts that each rank runs as its bytes want
  fullshard train --model vlm                      a tower for pictures that half of the texts have
  fullshard train data.paths=my_texts train.steps=300
  fullshard train --engine jax --nproc 4           the same on JAX, on 4 simulated devices
  fullshard train --nproc 4 shard.strategy=SHARD_GRAD_OP log.trace=true
  fullshard train settings.toml optim.lr=0.002     settings from a file, one of them changed
  fullshard train --resume runs/gpt-nano --nproc 4  go on after whatever has ended it
  torchrun --nproc-per-node 8 -m fullshard train   join ranks that torchrun (or srun) starts

settings with their defaults for gpt; in a TOML file the part before the dot is a [section]:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0 done, 1 failed, 2 invalid arguments."""
    parser = argparse.ArgumentParser(
        prog="fullshard",
        description="Train models that do not fit on one device: fully sharded data parallelism.",
        epilog="commands:\n  train   train a real model in one command, to see sharding work\n"
        "  run     start a script written for PyTorch's FSDP, unchanged, on fullshard\n"
        "  plan    tell whether a run fits, how fast it will be and what to choose; needs no GPU\n"
        "  calibrate  measure this machine for plan, in about a minute\n"
        "  report  tell where time and memory of a recorded run went, and what to change\n"
        "  ckpt    list, verify, seal, compare, rewrite, export and import checkpoints\n"
        "  doctor  find problems on this machine, on links between ranks and in scripts\n"
        "  prove   try losses, memory and order of the engine here, beside PyTorch's\n\n"
        "'fullshard COMMAND --help' explains a command.",
        formatter_class=HelpFormatter,
    )
    version = f"fullshard {installed_version('fullshard') or '(not installed)'}"
    parser.add_argument("--version", action="version", version=version, help="show it and exit")
    parser.add_argument("command", metavar="COMMAND", help="see below")
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    command, *arguments = sys.argv[1:] if argv is None else argv
    if command not in _COMMANDS:
        command = parser.parse_args([command]).command
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        parser.error(f"no command {command!r}: {hint}there are {', '.join(_COMMANDS)}")
    for stream in (sys.stdout, sys.stderr):  # a locale that lacks a block or an accent ends nothing
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        if any("\0" in text for text in arguments):
            raise ConfigurationError("an argument has a zero byte, which no path or name can have")
        status = _COMMANDS[command](arguments)
        print(end="", flush=True)  # takes a closed output (">&-"), which is None
        return status
    except FullshardError as error:
        print(f"fullshard {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    except BrokenPipeError:  # as of "| head": who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # SIGPIPE
    except SystemExit as ended:  # rich has taken the closed pipe
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return 128 + 13
    except (OSError, OverflowError, RecursionError, MemoryError) as error:
        print(f"fullshard {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


@leaving_at_once()
def _train(argv: Sequence[str]) -> int:
    with _needing("torch,train"):
        from fullshard.train.config import describe_options, resolve  # noqa: PLC0415
    parser = argparse.ArgumentParser(
        prog="fullshard train",
        usage="fullshard train [CONFIG.toml] [--model NAME] [--engine NAME]\n"
        "                       [--nproc N] [--resume [FOLDER]] [section.key=value ...]",
        description="Train a model with parameters, gradients and optimizer state sharded over "
        "ranks. Ends with a table of bytes per rank, the weights as one safetensors file and a "
        "sample of text, all kept in a new folder below runs/.",
        epilog=_TRAIN_EXAMPLES + describe_options(),
        formatter_class=HelpFormatter,
    )
    settings = "CONFIG.toml | section.key=value"
    described = "a settings file, and settings that override it"
    parser.add_argument("settings", nargs="*", metavar=settings, help=described)
    names = ["gpt", "moe", "vlm", "mnist"]
    parser.add_argument("--model", choices=names, help="short for model.name=")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks to start on this machine (default: one per GPU; 2 without a GPU); not for "
        "torchrun, which starts them itself",
    )
    parser.add_argument(
        "--engine",
        choices=["torch", "jax"],
        help="library that computes (default torch), short for train.engine=; jax runs all devices "
        "in one process, and without accelerators --nproc N simulates N devices",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="FOLDER",
        help="go on with a run, on any number of ranks: with this folder's settings and newest "
        "checkpoint, or without FOLDER with the newest unfinished run of the same settings, if "
        "there is one",
    )
    given = parser.parse_intermixed_args(argv)
    files = [text for text in given.settings if "=" not in text]
    if len(files) > 1:
        raise ConfigurationError(f"one settings file at most, got {', '.join(files)}")
    overrides = [text for text in given.settings if "=" in text]
    if given.resume is not None:
        overrides.append(f"checkpoint.resume={given.resume}")
        if given.resume != "auto" and not files:
            files = [f"{given.resume}/config.toml"]
    config = resolve(files[0] if files else None, overrides, given.model, given.engine)
    # Here torch or jax is loaded: after everything that can be refused without it.
    if config.train.engine == "jax":
        with _needing("jax,train"):
            from fullshard.train.jax.launch import launch as launch_jax  # noqa: PLC0415
        return launch_jax(config, given.nproc)
    with _needing("torch,train"):
        from fullshard.train.torch.launch import launch  # noqa: PLC0415
    return launch(config, given.nproc)


def _delegate(extras: str, module: str, argv: Sequence[str]) -> int:
    with _needing(extras):
        main: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return main(argv)


@contextmanager
def _needing(extras: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{error.name} is not installed: from the repository, pip install -e '.[{extras}]'"
        ) from error


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": _train,
    "run": partial(_delegate, "torch", "fullshard.run"),
    "plan": partial(_delegate, "plan", "fullshard.plan.command.main"),
    "calibrate": partial(_delegate, "torch", "fullshard.doctor.calibration"),
    "doctor": partial(_delegate, "torch,train", "fullshard.doctor"),
    "prove": partial(_delegate, "torch,train,prove", "fullshard.prove"),
    "report": partial(_delegate, "report", "fullshard.report.command"),
    "ckpt": partial(_delegate, "checkpoint", "fullshard.checkpoint.command"),
}
