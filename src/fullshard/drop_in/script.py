# SPDX-License-Identifier: Apache-2.0
"""Run a script as ``python script.py`` would, in a process that has the drop-in on."""

import argparse
import importlib.machinery
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

import torch.distributed as dist


def main(argv: Sequence[str]) -> None:
    """Run ``script.py [args]`` or ``-m module [args]``; ends the process as the script ends it."""
    parser = argparse.ArgumentParser(
        prog="python -m fullshard.drop_in",
        usage="python -m fullshard.drop_in [-m] script.py [args]",
        description="Run a script written for torch.distributed.fsdp on fullshard, in this "
        "process: under torchrun, or for a script that starts its ranks itself.",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    chosen = parser.parse_args(argv)
    if not (chosen.module or Path(chosen.script).is_file()):
        parser.error(f"there is no file {chosen.script!r}")
    sys.argv = [chosen.script, *chosen.arguments]
    try:
        if chosen.module:
            runpy.run_module(chosen.script, run_name="__main__", alter_sys=True)
        else:
            run_script(chosen.script)
    except SystemExit as end:
        if not end.code:
            _leave()
        raise
    _leave()


def _leave() -> None:
    """Destroy the process group if the script has left it open.

    A collective of Gloo that is still under way while the interpreter goes ends the process by
    SIGABRT ("terminate called without an active exception"). After an error nobody waits for it.
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def run_script(script: str) -> None:
    """Run the file ``script`` as ``__main__``; an exception is shown from the script's lines on.

    ``sys.path[0]`` becomes its folder; ``sys.argv`` is the caller's to set. The module stays
    ``sys.modules["__main__"]``: what it defines can be pickled by name, and spawned children
    import it from its file.
    """
    path = os.path.abspath(script)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__spec__ = None
    vars(module)["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    code = None
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(module))
    except Exception as error:
        _show(error, code)
        sys.exit(1)


def _show(error: Exception, code: CodeType | None) -> None:
    """As the interpreter shows what nobody caught, without the frames around the script's."""
    lines = error.__traceback__
    while lines is not None and lines.tb_frame.f_code is not code:
        lines = lines.tb_next
    error.__traceback__ = lines
    sys.excepthook(type(error), error, lines)
