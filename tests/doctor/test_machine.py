# SPDX-License-Identifier: Apache-2.0
"""Bad machines are told apart from good ones; none of them is this machine."""

import os
from dataclasses import replace

import pytest

from fullshard.doctor.machine.checks import check_machine as check
from fullshard.doctor.machine.checks import files_needed
from fullshard.doctor.machine.snapshot import Gpu, Machine, Space, facts, read_machine

GIB = 2**30
PACKAGES = {"torch": "2.13.0+cpu", "fullshard": "0.1.0", "numpy": "2.0", "safetensors": "0.5"}
GOOD = Machine(
    packages=PACKAGES,
    local_ranks=2,
    world_size=2,
    shared_memory=Space(8 * GIB, 8 * GIB),
    disk=Space(900 * GIB, 500 * GIB),
    open_files=1024,
    open_files_hard=4096,
)
GPU = Gpu("H100", 80 * GIB, 79 * GIB, (9, 0))
WITH_GPUS = replace(
    GOOD, gpus=(GPU, GPU), torch_cuda="13.0", driver="580.1", nccl="2.28.3", locked_bytes=None
)
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "4",
}
HOSTS = replace(GOOD, world_size=4, environ=TORCHRUN)


@pytest.mark.parametrize("machine", [GOOD, WITH_GPUS, HOSTS], ids=["cpu", "gpu", "hosts"])
def test_nothing_is_said_of_a_good_machine(machine):
    assert check(machine) == []


def packages(**changes):
    return replace(GOOD, packages={**PACKAGES, **changes})


def gpus(*devices, **changes):
    return replace(WITH_GPUS, gpus=devices, **changes)


def environ(machine=GOOD, **variables):
    return replace(machine, environ={**machine.environ, **variables})


BAD = {
    "old torch": (packages(torch="2.10.1"), "severe", "torch 2.10.1"),
    "new torch": (packages(torch="2.15.0a0"), "warning", "newer than what"),
    "cpu build": (replace(GOOD, driver="580.1"), "warning", "but no GPU"),
    "old driver": (replace(GOOD, driver="390.1", torch_cuda="13.0"), "warning", "but no GPU"),
    "hidden": (
        environ(replace(GOOD, driver="580.1", torch_cuda="13.0"), CUDA_VISIBLE_DEVICES=""),
        "warning",
        "but no GPU",
    ),
    "too few GPUs": (gpus(GPU), "severe", "2 ranks on this host, 1 GPUs"),
    "kinds": (gpus(GPU, replace(GPU, name="L4")), "warning", "different kinds: H100, L4"),
    "taken": (gpus(GPU, replace(GPU, free_bytes=9 * GIB)), "warning", "GPU 1: 9.0 GiB free"),
    "no bf16": (gpus(*2 * [replace(GPU, capability=(7, 5))]), "note", "without bfloat16"),
    "no peers": (gpus(GPU, GPU, no_peer_access=((0, 1),)), "warning", "between GPUs 0-1"),
    "no gloo": (replace(GOOD, backends=()), "severe", "no gloo backend"),
    "no nccl": (replace(WITH_GPUS, backends=("gloo",)), "severe", "no nccl backend"),
    "shm": (replace(GOOD, shared_memory=Space(64 << 20, 64 << 20)), "warning", "64 MiB free of"),
    "files": (replace(GOOD, open_files=100), "severe", "at most 100 open files"),
    "files of many": (
        replace(GOOD, world_size=200, cores=200, local_ranks=200, shared_memory=None),
        "severe",
        "200 ranks may need",
    ),
    "locked": (replace(WITH_GPUS, locked_bytes=65536), "note", "at most 0.06 MiB of locked"),
    "ranks": (replace(GOOD, cores=1), "warning", "2 ranks on 1 core"),
    "threads": (environ(OMP_NUM_THREADS="8"), "warning", "OMP_NUM_THREADS=8 x 2 ranks on 8"),
    "idle cores": (environ(OMP_NUM_THREADS="1"), "note", "OMP_NUM_THREADS=1 with 8 cores"),
    "threads not set": (environ(HOSTS, OMP_NUM_THREADS=""), "warning", "is not set"),
    "no name": (replace(GOOD, hostname_addresses=()), "warning", "does not resolve"),
    "no name, hosts": (replace(HOSTS, hostname_addresses=()), "severe", "does not resolve"),
    "loopback": (replace(GOOD, hostname_addresses=("127.0.1.1",)), "note", "to 127.0.1.1 only"),
    "loopback, hosts": (replace(HOSTS, hostname_addresses=("127.0.1.1",)), "severe", "127.0.1.1"),
    "gloo's interface": (environ(GLOO_SOCKET_IFNAME="ib0"), "severe", "no interface ib0"),
    "one of gloo's": (environ(GLOO_SOCKET_IFNAME="eth0,ib0"), "severe", "no interface ib0"),
    "nccl's interface": (environ(NCCL_SOCKET_IFNAME="=eth"), "severe", "no interface eth"),
    "lo, hosts": (environ(HOSTS, NCCL_SOCKET_IFNAME="lo"), "severe", "NCCL_SOCKET_IFNAME=lo, but"),
    "no master": (replace(HOSTS, master_addresses=()), "severe", "MASTER_ADDR=node0 does not"),
    "own master": (replace(HOSTS, master_addresses=("::1",)), "severe", "is this host itself"),
    "disk": (replace(GOOD, disk=Space(90 * GIB, GIB)), "warning", "1.00 GiB of disk free"),
    "half a launch": (environ(RANK="0", OMP_NUM_THREADS="4"), "severe", "but not WORLD_SIZE"),
    "no number": (
        environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="two"),
        "severe",
        "invalid literal",
    ),
    "hosts of mpirun": (
        environ(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="4"),
        "severe",
        "does not say which host has rank 0",
    ),
    "rank": (environ(HOSTS, RANK="4"), "severe", "RANK=4 with WORLD_SIZE=4"),
    "local rank": (environ(HOSTS, LOCAL_RANK="2"), "severe", "LOCAL_RANK=2"),
    "no srun": (environ(SLURM_NTASKS="4"), "warning", "SLURM gave 4 tasks"),
    "peer to peer": (environ(WITH_GPUS, NCCL_P2P_DISABLE="1"), "warning", "NCCL_P2P_DISABLE=1"),
    "blocking": (environ(WITH_GPUS, CUDA_LAUNCH_BLOCKING="1"), "warning", "LAUNCH_BLOCKING=1"),
    "waiting": (environ(WITH_GPUS, TORCH_NCCL_BLOCKING_WAIT="1"), "warning", "BLOCKING_WAIT=1"),
    "errors": (
        environ(WITH_GPUS, TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
        "warning",
        "ASYNC_ERROR_HANDLING=0",
    ),
    "allocator": (
        environ(WITH_GPUS, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:128"),
        "note",
        "max_split_size_mb",
    ),
    "debug": (environ(TORCH_DISTRIBUTED_DEBUG="DETAIL"), "warning", "DEBUG=DETAIL"),
    "pickle": (environ(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"), "warning", "WEIGHTS_ONLY_LOAD=1"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_fault_is_found_and_nothing_else(case):
    machine, severity, words = case
    found = check(machine)
    assert [each.severity for each in found] == [severity]
    assert words in found[0].what
    assert found[0].means
    assert found[0].fix


GOOD_VALUES = (
    {"NCCL_P2P_DISABLE": "0"},
    {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
    {"NCCL_SOCKET_IFNAME": "eth,ib"},
    {"NCCL_SOCKET_IFNAME": "^docker,lo"},
    {"GLOO_SOCKET_IFNAME": "eth0"},
    {"OMP_NUM_THREADS": "4"},
    {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
)


@pytest.mark.parametrize("variables", GOOD_VALUES, ids=str)
def test_harmless_values(variables):
    assert check(environ(WITH_GPUS, **variables)) == []


def test_switches_of_nccl_do_not_matter_without_gpus():
    assert check(environ(CUDA_LAUNCH_BLOCKING="1", NCCL_P2P_DISABLE="1")) == []


def test_loopback_is_right_with_a_chosen_interface():
    machine = replace(HOSTS, hostname_addresses=("127.0.1.1",))
    assert check(environ(machine, GLOO_SOCKET_IFNAME="eth0")) == []


def test_the_mend_of_few_files_stays_below_the_hard_limit():
    needed = files_needed(2)
    (within,) = check(replace(GOOD, open_files=100, open_files_hard=needed))
    assert f"ulimit -n {needed}" in within.fix
    (above,) = check(replace(GOOD, open_files=100, open_files_hard=needed - 1))
    assert "hard limit" in above.fix


def test_this_machine_can_be_read():
    machine = read_machine(2, 2, {"MASTER_ADDR": "no.such.host.invalid"})
    assert machine.master_addresses == ()
    assert machine.packages["torch"]
    assert machine.interfaces
    assert 1 <= machine.cores <= os.cpu_count()
    known = facts(machine)
    assert known["torch"] == machine.packages["torch"]
    assert machine.hostname in known["host"]
