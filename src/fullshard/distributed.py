# SPDX-License-Identifier: Apache-2.0
"""Four calls for a training script: join the ranks, know the device, print once, leave.

    import fullshard as sft

    sft.initialize_distributed_training()
    device = sft.get_device()
    sft.log("starting on", device)
    ...
    sft.cleanup()

The same script runs under torchrun, Open MPI and SLURM, and alone, as a world of one.
"""

import atexit
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.launchers import check_nproc, launcher_environment, local_rank_of, rank_of

__all__ = [
    "cleanup", "default_nproc", "get_device", "initialize_distributed_training", "join",
    "local_nproc", "log",
]  # fmt: skip


@dataclass
class _Here:
    """The state of this process: when it began, and how it joined."""

    began_s: float
    joined_with: tuple[str, float | None] | None = None


_here = _Here(time.monotonic())


def initialize_distributed_training(
    backend: str | None = None, timeout_s: float | None = None
) -> None:
    """Join the ranks that a launcher has started; alone, be a world of one. Collective.

    The environment of torchrun, Open MPI or SLURM is read (`fullshard.launchers`) and, for the
    latter two, completed to what torch.distributed and torchrun's scripts read. Where there are
    GPUs, this process takes the one of its number on the host, and collectives of GPU tensors go
    over NCCL, those of CPU tensors over Gloo ("cpu:gloo,cuda:nccl"); without GPUs all over Gloo.
    ``backend`` chooses otherwise, in the words of `torch.distributed.init_process_group`, and
    ``timeout_s`` is how many seconds a collective may take (None: torch's default).

    Calling it again with the same arguments, or none, does nothing; so does calling it when a group
    of that backend exists already. What is left open is closed when the interpreter exits, unless
    an error ends it: see `cleanup`.

    Raises:
        ConfigurationError: if the launcher has said too little, or ``timeout_s`` is not above 0.
        UsageError: if the ranks have been joined with another backend or timeout.
    """
    join(backend, timeout_s)
    atexit.unregister(_leave_at_exit)
    atexit.register(_leave_at_exit)


def join(backend: str | None = None, timeout_s: float | None = None) -> None:
    """`initialize_distributed_training` for who calls `cleanup` for certain. Collective."""
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigurationError(f"timeout_s must be above 0 seconds, got {timeout_s!r}")
    if dist.is_initialized():
        _check_joined_alike(backend, timeout_s)
        return
    found = launcher_environment(os.environ)
    os.environ.update(found or {})
    device = get_device()
    on_gpu = device.type == "cuda" and dist.is_nccl_available()
    chosen = backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    # Naming the device makes NCCL connect now and not at first use. Not beside Gloo: subgroups are
    # then split off the world, which for two backends at once not every torch can do.
    device_id = device if on_gpu and chosen == "nccl" else None
    if found is None:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(
            chosen, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id
        )
    else:
        dist.init_process_group(chosen, timeout=timeout, device_id=device_id)
    _here.joined_with = (chosen, timeout_s)


def default_nproc() -> int:
    """Return the number of ranks to start on this host: one for each GPU, or two without GPUs."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def local_nproc(nproc: int | None) -> int:
    """Return ``nproc``, or the default. Raises `ConfigurationError` if there are fewer GPUs."""
    nproc = default_nproc() if nproc is None else check_nproc(nproc)
    if torch.cuda.is_available() and nproc > (gpus := torch.cuda.device_count()):
        raise ConfigurationError(f"--nproc {nproc} ranks need a GPU each, but there are {gpus}")
    return nproc


def get_device() -> torch.device:
    """This rank's GPU, or the CPU where torch sees none. Before joining, too; not collective.

    That is the GPU of this process's number on its host, counted round if a launcher shows fewer
    (one each, usually); without a launcher, and once `initialize_distributed_training` has made it
    the current one, that.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = local_rank_of(os.environ)
    if number is None and "RANK" in os.environ:
        number = rank_of(os.environ)  # hosts are alike, or there is one
    if _here.joined_with is not None or number is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda", number % torch.cuda.device_count())


def log(*values: object, all_ranks: bool = False) -> None:
    """Print ``values`` like `print` on rank 0, with the time and the seconds since the first use.

    With ``all_ranks`` every rank that calls it prints, and says which it is. Each call is one write
    that is flushed, so lines of ranks do not mix; text of several lines begins on one of its own.
    Before the ranks are joined the launcher says who is rank 0; without one this process is. Not
    collective.
    """
    rank = dist.get_rank() if dist.is_initialized() else rank_of(os.environ)
    if rank != 0 and not all_ranks:
        return
    since_s = time.monotonic() - _here.began_s
    who = f" rank {rank}" if all_ranks else ""
    text = " ".join(map(str, values))
    gap = "\n" if "\n" in text else " "  # a table keeps its columns
    stamp = f"[{time.strftime('%H:%M:%S')} +{since_s:.1f}s{who}]"
    print(f"{stamp}{gap}{text}\n", end="", flush=True)


def cleanup() -> None:
    """Leave the other ranks: let the device finish what was begun, then destroy the process group.

    All ranks should call it; none waits for another one here. Does nothing if there is no group, so
    it may be called twice. While an error is being handled (in a ``finally``) the group is left to
    the end of the process: to destroy it could wait for collectives that will never end, and would
    fail the other ranks before this one has said why.
    """
    if not dist.is_initialized():
        return
    if sys.exception() is not None:
        atexit.unregister(_leave_at_exit)
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _here.joined_with = None
    dist.destroy_process_group()


def _leave_at_exit() -> None:
    # After an uncaught error, which Python keeps in sys.last_value, the end of the process says it.
    if getattr(sys, "last_value", None) is None:
        cleanup()


def _check_joined_alike(backend: str | None, timeout_s: float | None) -> None:
    known = _here.joined_with
    config = str(dist.get_backend_config())
    wanted = config if backend is None else str(dist.BackendConfig(dist.Backend(backend)))
    if wanted != config:
        raise UsageError(
            f"the ranks are joined over {config!r} already, not over {wanted!r}; choose the "
            "backend in the first call, or call cleanup() before the next"
        )
    if timeout_s is not None and known is not None and timeout_s != known[1]:
        raise UsageError(
            f"the ranks are joined already, with timeout_s={known[1]}, not {timeout_s}; choose it "
            "in the first call, or call cleanup() before the next"
        )
