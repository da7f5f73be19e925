# SPDX-License-Identifier: Apache-2.0
"""What launchers say in the environment is understood."""

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.launchers import (
    first_host,
    launcher_environment,
    local_rank_of,
    rank_of,
    threads_per_rank,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node7-1234@1",
}
ACROSS_HOSTS = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,09],cpu1", "gpu03"),
        ("a1,a2", "a1"),
        ("node7", "node7"),
        ("x[1,4]", "x1"),
        ("", "localhost"),
    ],
)
def test_slurm_becomes_what_torch_expects(nodes, host):
    assert first_host(nodes) == host
    assert launcher_environment({**SLURM, "SLURM_JOB_NODELIST": nodes}) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": "21234",
    }


@pytest.mark.parametrize(
    ("tasks", "local"), [("4(x2)", "4"), ("8", "8"), ("4,3", None), ("4(x2),3", None), ("", None)]
)
def test_slurm_tells_how_many_share_a_host(tasks, local):
    found = launcher_environment({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert found.get("LOCAL_WORLD_SIZE") == local


def test_a_step_of_fewer_tasks_than_the_allocation_counts_its_own():
    found = launcher_environment({**SLURM, "SLURM_STEP_NUM_TASKS": "6"})
    assert found["WORLD_SIZE"] == "6"


def test_open_mpi_becomes_what_torch_expects():
    found = launcher_environment(OPEN_MPI)
    port = int(found.pop("MASTER_PORT"))
    assert found == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
    }
    assert 20_000 <= port < 40_000
    other_rank = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert launcher_environment(other_rank)["MASTER_PORT"] == str(port)
    other_job = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-node7-1235@1"}
    assert launcher_environment(other_job)["MASTER_PORT"] != str(port)


def test_open_mpi_across_hosts_must_name_one():
    with pytest.raises(ConfigurationError, match="-x MASTER_ADDR=<host of rank 0>"):
        launcher_environment(ACROSS_HOSTS)
    found = launcher_environment({**ACROSS_HOSTS, "MASTER_ADDR": "n1", "MASTER_PORT": "7"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["LOCAL_RANK"]) == ("n1", "7", "1")
    assert found["LOCAL_WORLD_SIZE"] == "2"


def test_a_given_address_is_kept():
    for environ in (SLURM, OPEN_MPI):
        found = launcher_environment({**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"})
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "99")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_without_a_launcher_there_is_nothing_to_join(environ):
    assert launcher_environment(environ) is None
    assert rank_of(environ) == 0
    assert local_rank_of(environ) is None


def test_nproc_starts_ranks_inside_of_a_slurm_allocation():
    assert launcher_environment(SLURM, local_only=True) is None


@pytest.mark.parametrize("environ", [{**TORCHRUN, **SLURM}, OPEN_MPI])
def test_nproc_contradicts_a_launcher(environ):
    with pytest.raises(ConfigurationError, match="leave --nproc out"):
        launcher_environment(environ, local_only=True)


def test_torchrun_is_joined_as_it_is():
    environ = {**TORCHRUN, **SLURM, **OPEN_MPI}
    assert launcher_environment(environ) == {}
    del environ["MASTER_ADDR"]
    with pytest.raises(ConfigurationError, match="but not MASTER_ADDR"):
        launcher_environment(environ)


def test_the_innermost_launcher_counts():
    assert launcher_environment({**SLURM, **OPEN_MPI})["RANK"] == "3"
    assert rank_of({**SLURM, **OPEN_MPI}) == 3
    assert rank_of({**TORCHRUN, **OPEN_MPI}) == 1


@pytest.mark.parametrize(
    ("environ", "rank", "local"),
    [
        (SLURM, 5, 1),
        (OPEN_MPI, 3, 3),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, 1, 0),
        (TORCHRUN, 1, None),
        ({"RANK": "2"}, 2, None),  # too little to join, enough to know who prints
    ],
)
def test_rank_and_local_rank(environ, rank, local):
    assert rank_of(environ) == rank
    assert local_rank_of(environ) == local


def test_threads_share_the_cores():
    assert [threads_per_rank(nproc, 8) for nproc in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
