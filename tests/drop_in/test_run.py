# SPDX-License-Identifier: Apache-2.0
"""``fullshard run`` and ``python -m fullshard.drop_in``, as their users start them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.limits import PROCESS_S

import fullshard.run
from fullshard.cli import main as command
from fullshard.core.errors import ConfigurationError

SCRIPTS = Path(__file__).parent / "scripts"
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "PET_NPROC_PER_NODE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*LAUNCHERS, "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("HERE = True\n")
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\n"
        "from beside import HERE\n"
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "def fail(message):\n"
        "    raise ValueError(message)\n"
        "if __name__ == '__main__':\n"
        "    import __main__\n"
        "    assert __main__.fail is fail\n"
        "    print(FSDP.__module__, sys.argv, sys.path[0], __file__, __spec__, sep='\\n')\n"
        "    if sys.argv[1] == 'fail':\n"
        "        fail('too bad')\n"
        "    sys.stdout.flush()\n"
        "    told = __file__ + '.told'\n"
        "    import atexit\n"
        "    import torch.distributed as dist\n"
        "    def tell():\n"
        "        print('has left', not dist.is_initialized(), flush=True)\n"
        "        open(told, 'w').close()\n"
        "    dist.init_process_group('gloo')\n"
        "    dist.barrier()  # or a rank that is still connecting finds the other one gone\n"
        "    if os.environ.get('RANK') == '0':\n"
        "        atexit.register(tell)\n"
        "    while os.environ.get('RANK') == '1' and not os.path.exists(told):\n"
        "        pass  # torchrun ends the other rank when this one fails\n"
        "    sys.exit(int(sys.argv[2]) if os.environ.get('RANK') == '1' else 0)\n"
    )
    return path


def python(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        check=False,
    )


@pytest.mark.slow
def test_a_script_finds_itself_as_python_alone_would_run_it(script):
    folder = str(script.parent)
    done = python("fullshard.drop_in", script, "fail", "--nproc", "9")
    argv = [str(script), "fail", "--nproc", "9"]
    assert done.stdout.splitlines() == [
        "fullshard.torch.fsdp1.wrapper",
        str(argv),
        folder,
        str(script),
        "None",
    ]
    assert done.returncode == 1
    assert re.sub(r"\s*[~^]+\n", "\n", done.stderr).splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 11, in <module>',
        "    fail('too bad')",
        f'  File "{script}", line 5, in fail',
        "    raise ValueError(message)",
        "ValueError: too bad",
    ]


@pytest.mark.slow
def test_the_exit_status_is_that_of_the_rank_that_failed(script, monkeypatch, capfd):
    for name in ("OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "1" if name != "GLOO_SOCKET_IFNAME" else "lo")
    assert command(["run", "--nproc", "2", str(script), "exit", "7"]) == 7
    printed = capfd.readouterr()
    assert printed.out.count("fullshard.torch.fsdp1.wrapper") == 2
    assert "fullshard run: rank 1 ended with exit status 7" in printed.err
    assert "has left True" in printed.out  # rank 0, which has ended well


@pytest.mark.thorough
def test_spawned_ranks_have_the_drop_in(unused_port):
    done = python(
        "fullshard", "run", "--no-launch", SCRIPTS / "spawn_fsdp1.py", "--port", unused_port
    )
    assert done.returncode == 0, done.stderr
    first, second, kind = done.stdout.splitlines()
    assert kind == "<class 'fullshard.torch.fsdp1.wrapper.FullyShardedDataParallel'>"
    assert float(first.split()[-1]) > float(second.split()[-1])


@pytest.fixture
def started(monkeypatch):
    calls = []
    monkeypatch.setattr(fullshard.run, "run", calls.append)
    monkeypatch.setattr(os, "execv", lambda *call: calls.append(call))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return calls


def test_torchruns_options_and_the_scripts_own_are_told_apart(script, started):
    assert command(["run", "--max-restarts=3", str(script), "--nproc", "5", "--help"]) == 0
    (options,) = started
    assert (options.nproc_per_node, options.max_restarts) == ("2", 3)  # no GPU here
    assert (options.module, options.training_script) == (True, "fullshard.drop_in")
    assert options.training_script_args == [str(script), "--nproc", "5", "--help"]


def test_a_scripts_flags_are_never_torchruns(script, started):
    for own in (["--run", "5", "--r"], ["--", "--run", "5", "--r"]):
        assert command(["run", str(script), *own]) == 0
    for options in started:
        assert options.training_script_args == [str(script), "--run", "5", "--r"]


@pytest.mark.parametrize(
    ("options", "backend"),
    [([], "fullshard-local"), (["--standalone"], "fullshard-local"), (["--nnodes", "2"], "static")],
)
def test_ranks_of_one_host_meet_on_loopback(started, options, backend, capsys):
    assert command(["run", *options, "-m", "some.module"]) == 0
    assert started[0].rdzv_backend == backend
    assert capsys.readouterr().err == "fullshard is in place of torch.distributed.fsdp\n"
    if not options:
        handler = fullshard.run._LocalRendezvous(SimpleNamespace(run_id="1"))
        first, second = handler.next_rendezvous(), handler.next_rendezvous()
        first.store.set("left", "by the ranks before")
        assert not second.store.check(["left"])
        assert first.bootstrap_store_info.master_addr == "127.0.0.1"


@pytest.mark.parametrize("option", ["--nproc", "--nproc-per-node", "--nproc_per_node"])
def test_the_number_of_ranks(started, option):
    assert command(["run", option, "3", "-m", "some.module", "-m"]) == 0
    (options,) = started
    assert options.nproc_per_node == "3"
    assert options.training_script_args == ["-m", "some.module", "-m"]


def test_a_launchers_rank_is_joined(script, started, monkeypatch):
    for name, value in zip(LAUNCHERS[:4], ("1", "4", "host", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    command(["run", str(script), "--lr", "1"])
    arguments = [sys.executable, "-m", "fullshard.drop_in", str(script), "--lr", "1"]
    assert started[0] == (sys.executable, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.py"], "there is no file 'no/such.py'"),
        (["--no-python", "ls"], "leave out --no-python"),
        (["--no-launch", "--nproc", "2", "-m", "x"], "leave --nproc out"),
        (["--nproc", "0", "-m", "x"], "at least 1, got 0"),
        (["--nproc", "-1", "-m", "x"], "at least 1, got -1"),
        (["--nproc", "99999", "-m", "x"], "at most 1024, got 99999"),
        (["--nnodes", "0", "-m", "x"], "--nnodes must be hosts, as in 2, or 1:4, got '0'"),
        (["--rdzv-conf", "x", "-m", "x"], "torchrun refuses these options"),
    ],
)
def test_what_cannot_be_is_refused(started, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        fullshard.run.main(arguments)
    assert not started


def test_what_torchrun_refuses_is_said_in_a_line(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigurationError, match="nproc_per_node value: many"):
        fullshard.run.main(["--nproc", "many", "-m", "x"])
