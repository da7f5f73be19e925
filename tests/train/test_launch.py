# SPDX-License-Identifier: Apache-2.0
import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.train.launch import launcher_environment, threads_per_rank

SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "41234"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,09],cpu1", "gpu03"), ("a1,a2", "a1"), ("node7", "node7"), ("x[1,4]", "x1")],
)
def test_slurm_becomes_what_torch_expects(nodes, host):
    assert launcher_environment({**SLURM, "SLURM_JOB_NODELIST": nodes}) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": host,
        "MASTER_PORT": "21234",
    }


def test_a_given_address_is_kept():
    found = launcher_environment({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "99")


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_ID": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}]
)
def test_without_a_launcher_there_is_nothing_to_join(environ):
    assert launcher_environment(environ) is None


def test_nproc_starts_ranks_inside_of_a_slurm_allocation():
    assert launcher_environment(SLURM, local_only=True) is None


def test_torchrun_is_joined_as_it_is():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1", **SLURM}
    assert launcher_environment(environ) == {}
    with pytest.raises(ConfigurationError, match="leave --nproc out"):
        launcher_environment(environ, local_only=True)
    del environ["MASTER_ADDR"]
    with pytest.raises(ConfigurationError, match="but not MASTER_ADDR"):
        launcher_environment(environ)


def test_threads_share_the_cores():
    assert [threads_per_rank(nproc, 8) for nproc in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
