# SPDX-License-Identifier: Apache-2.0
"""``fullshard run``: torchrun for scripts written for ``torch.distributed.fsdp``, on fullshard."""

import argparse
import copy
import os
import re
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import config_from_args, get_args_parser, run

from fullshard.core.errors import ConfigurationError
from fullshard.distributed import default_nproc
from fullshard.launchers import (
    check_nproc,
    launcher_environment,
    rank_of,
    threads_per_rank,
    usable_cores,
)
from fullshard.local_ranks import LOOPBACK, serve_store, stay_on_loopback

_DROP_IN = "fullshard.drop_in"
_LOCAL = "fullshard-local"
# Where torchrun's ranks meet if nobody says.
_NOWHERE: dict[str, tuple[object, ...]] = {
    "nnodes": ("1:1", "1"),
    "rdzv_backend": ("static",),
    "rdzv_endpoint": ("",),
    "rdzv_conf": ("",),
    "master_addr": ("127.0.0.1",),
    "master_port": (None, 29500),  # by the version of torch
    "node_rank": (0,),
}


def main(argv: Sequence[str]) -> int:
    """Run a script on the ranks of a launcher, or on ranks that are started here by torchrun.

    Returns the exit status: that of the rank that failed first, 128 plus the signal's number where
    a signal ended it. Raises `ConfigurationError` before anything is started.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.no_python or options.run_path:
        raise ConfigurationError("a Python script is run: leave out --no-python and --run-path")
    if not options.module and not os.path.isfile(options.training_script):
        raise ConfigurationError(f"there is no file {options.training_script!r}")
    own = options.training_script_args
    script = [options.training_script, *(own[1:] if own[:1] == ["--"] else own)]
    if options.module:
        script.insert(0, "-m")
    if options.no_launch and options.nproc_per_node is not None:
        raise ConfigurationError("--no-launch starts no ranks: leave --nproc out")
    found = launcher_environment(os.environ, local_only=options.nproc_per_node is not None)
    if found is not None or options.no_launch:
        os.environ.update(found or {})
        if rank_of(os.environ) == 0:
            _say_what_is_in_place()
        print(end="", flush=True)
        os.execv(sys.executable, [sys.executable, "-m", _DROP_IN, *script])
    if options.nproc_per_node is None:
        options.nproc_per_node = str(default_nproc())
    if re.fullmatch(r"-?\d+", options.nproc_per_node):
        check_nproc(int(options.nproc_per_node[:20]))
    _share_cores(options.nproc_per_node)
    _check_hosts(options.nnodes)
    if options.standalone or all(
        getattr(options, key) in values for key, values in _NOWHERE.items()
    ):
        options.standalone, options.rdzv_backend = False, _LOCAL
        del options.master_addr  # or torch 2.14 says that it plays no part
        stay_on_loopback()
    # Ranks that torchrun restarts would find the store of those before them, and wait for their
    # addresses: https://github.com/pytorch/pytorch/issues/135712
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options.module, options.training_script, options.training_script_args = True, _DROP_IN, script
    try:
        config_from_args(options)
    except Exception as error:  # whatever torchrun's own options can be wrong in
        raise ConfigurationError(f"torchrun refuses these options: {error}") from error
    _say_what_is_in_place()
    return _start(options)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = get_args_parser()
    parser.prog = "fullshard run"
    parser.formatter_class = _DashesOnly
    parser.allow_abbrev = False  # or a script's --run would be torchrun's --run-path
    parser.usage = "fullshard run [--nproc N] [torchrun options] [-m] script.py [args]"
    parser.description = (
        "Start a script written for torch.distributed.fsdp, unchanged, on fullshard. Takes the "
        "options of torchrun; joins the ranks of torchrun or srun where one of them started this."
    )
    parser.add_argument(
        "--nproc",
        dest="nproc_per_node",
        metavar="N",
        default=argparse.SUPPRESS,
        help="ranks to start on this machine (default: one per GPU; 2 without a GPU); short for "
        "--nproc-per-node",
    )
    parser.add_argument(
        "--no-launch",
        action="store_true",
        help="start the script once, for one that starts its ranks itself (mp.spawn)",
    )
    if "PET_NPROC_PER_NODE" not in os.environ:  # torchrun's own way to set it
        parser.set_defaults(nproc_per_node=None)
    return parser


class _DashesOnly(argparse.HelpFormatter):
    """Help that leaves out torchrun's second spelling of its options, so that lines fit."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add ``action`` as it is spelled with dashes."""
        action = copy.copy(action)
        action.option_strings = [name for name in action.option_strings if "_" not in name]
        super().add_argument(action)


def _check_hosts(nnodes: str) -> None:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", nnodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigurationError(f"--nnodes must be hosts, as in 2, or 1:4, got {nnodes!r}")


def _say_what_is_in_place() -> None:
    print("fullshard is in place of torch.distributed.fsdp", file=sys.stderr, flush=True)


class _LocalRendezvous(StaticTCPRendezvous):
    """The meeting of ranks of this machine: for each start of them a new store, on loopback.

    Ranks that torchrun restarts would find in its own store what those before them have left, and
    wait for their addresses: https://github.com/pytorch/pytorch/issues/135712
    """

    def __init__(self, params: RendezvousParameters) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, params.run_id, timeout=0)

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next start."""
        store = serve_store()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def get_backend(self) -> str:
        """Return the name under which torchrun knows it."""
        return _LOCAL


rendezvous_handler_registry.register(_LOCAL, _LocalRendezvous)


def _share_cores(nproc: str) -> None:
    """Give each of ``nproc`` ranks its part of the cores, where torchrun would give it one core."""
    if nproc.isdecimal() and int(nproc) > 0:
        threads = threads_per_rank(int(nproc), usable_cores())
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _start(options: argparse.Namespace) -> int:
    try:
        run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        code = int(first.exitcode)
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        print(f"fullshard run: rank {rank} ended with {how}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except ValueError as error:  # of torchrun's options; a script's errors end its own process
        raise ConfigurationError(str(error)) from error
    except SignalException as stopped:
        print("fullshard run: interrupted; all ranks have ended", file=sys.stderr)
        return 128 + int(stopped.sigval)
    return 0
