# SPDX-License-Identifier: Apache-2.0
"""Find what is certainly wrong in a script in its line, and say nothing of what may be right."""

import textwrap
from pathlib import Path

import pytest

from fullshard.core.errors import ConfigurationError
from fullshard.doctor.scripts import check_script, check_scripts

ROOT = Path(__file__).resolve().parents[2]

HEAD = """\
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, fully_shard
"""
FSDP1 = HEAD + "model = FSDP(Net())\noptimizer = torch.optim.AdamW(model.parameters())\n"

WRONG = {
    "a state dict": (
        "if dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'model.pt')  # here\n",
        "model.state_dict() runs on some ranks only",
    ),
    "save_pretrained": (
        "if int(os.environ['RANK']) == 0 and due:\n    model.save_pretrained('m')  # here\n",
        "model.save_pretrained() runs on some ranks only",
    ),
    "a model that the trainer shards": (
        """
        class Trainer:
            def __init__(self):
                self.model = FSDP(Net())

            def save(self):
                if self.local_rank == 0:
                    self.model.state_dict()  # here
        """,
        "self.model.state_dict() runs",
    ),
    "after a return": (
        """
        def save(model, rank):
            if rank != 0:
                return
            torch.save(get_model_state_dict(model), "model.pt")  # here
        """,
        "get_model_state_dict() runs on some ranks only (line 11: rank != 0)",
    ),
    "a context": (
        "if not rank:\n    with FSDP.summon_full_params(model):  # here\n        pass\n",
        "FSDP.summon_full_params() runs",
    ),
    "a checkpoint": (
        "is_main = os.environ.get('RANK', '0') == '0'\n"
        "if is_main:\n    dcp.save({}, checkpoint_id='here')  # here\n",
        "dcp.save() runs on some ranks only",
    ),
    "a barrier": ("if rank == 0:\n    dist.barrier()  # here\n", "dist.barrier() runs"),
    "a forward": ("if rank == 0:\n    print(model(batch))  # here\n", "model() runs"),
    "an expression": (
        "state = model.state_dict() if rank == 0 else None  # here\n",
        "model.state_dict() runs",
    ),
    "optimizer, then FSDP": (
        "net = Net()\nsteps = torch.optim.Adam(net.parameters())  # here\nnet = FSDP(net)\n",
        "the optimizer is made before net is sharded (line 11)",
    ),
    "optimizer, then fully_shard": (
        "net = Net()\nsteps = torch.optim.Adam([{'params': net.parameters()}])  # here\n"
        "for block in net.blocks:\n    fully_shard(block)\nfully_shard(net)\n",
        "the optimizer is made before net is sharded (line 13)",
    ),
    "a name of another version": (
        "from torch.distributed.fsdp import FullyShardedModel  # here\n",
        "no torch.distributed.fsdp.FullyShardedModel",
    ),
    "a module of another version": (
        "from torch.distributed.nothing.here import name  # here\n",
        "no torch.distributed.nothing.here.name",
    ),
    "no Python": ("def main(:  # here\n", "cannot read the script"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_what_fails_or_hangs_is_severe(case):
    text, words = case
    whole = FSDP1 + textwrap.dedent(text)
    (line,) = (n for n, one in enumerate(whole.splitlines(), 1) if one.endswith("# here"))
    (finding,) = check_script(whole, "train.py")
    assert (finding.severity, finding.where) == ("severe", f"train.py:{line}")
    assert words in finding.what
    assert finding.means
    assert finding.fix


RIGHT = {
    "written on one rank": "s = model.state_dict()\nif rank == 0:\n    torch.save(s, 'm')\n",
    "a pretrained model of whole values": (
        "s = model.state_dict()\nif rank == 0:\n    model.save_pretrained('m', state_dict=s)\n"
    ),
    "both arms": "if rank == 0:\n    s = model.state_dict()\nelse:\n    model.state_dict()\n",
    "a plain model": """
        def save(rank):
            plain = Net()
            if rank == 0:
                plain.load_state_dict(state)
                torch.save(plain.state_dict(), "model.pt")
        """,
    "bound to another": "model = Net()\nif rank == 0:\n    model.state_dict()\n",
    "a group of its own": "if rank == 0:\n    dist.barrier(group=alone)\n",
    "messages": "if rank == 0:\n    dist.send(weights, 1)\nelif rank == 1:\n    dist.recv(w, 0)\n",
    "a scheduler": "if rank == 0:\n    torch.save(scheduler.state_dict(), 's.pt')\n",
    "not distributed": "if rank == -1:\n    model.state_dict()\n",
    "either": "if rank == 0 or everywhere:\n    model.state_dict()\n",
    "optimizer after": "net = Net()\nfully_shard(net)\nopt = torch.optim.Adam(net.parameters())\n",
    "parameters that are followed": """
        net = Net()
        steps = torch.optim.Adam(net.parameters())
        net = FSDP(net, use_orig_params=True)
        """,
    "one run after the other": """
        net = FSDP(Net())
        steps = torch.optim.Adam(net.parameters())
        net = Net()
        net = FSDP(net)
        """,
    "one way or the other": """
        net = Net()
        if plain:
            steps = torch.optim.Adam(net.parameters())
        else:
            net = FSDP(net)
        """,
    "another package's module": "from torch.utils.tensorboard import SummaryWriter\n",
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_nothing_is_said_of_what_may_be_right(text):
    assert check_script(FSDP1 + textwrap.dedent(text)) == []


def test_a_name_of_ours_on_pytorchs_wrapper_is_a_note():
    text = "FSDP(Net(), sharding_strategy=FSDP.ShardingStrategy.FULL_SHARD)\n"
    (finding,) = check_script(HEAD + text)
    assert (finding.severity, finding.what) == ("note", "FSDP.ShardingStrategy is not in PyTorch")
    ours = HEAD.replace("torch.distributed.fsdp import", "fullshard.torch import")
    assert check_script(ours + text) == []


def test_files_are_read_as_python_reads_them(tmp_path):
    path = tmp_path / "script.py"
    for text in (b"\xef\xbb\xbfimport torch\n", b"# coding: latin-1\nname = '\xe9'\n"):
        path.write_bytes(text)
        assert check_scripts([str(path)]) == []
    for text in (b"# coding: nonsense\n", b"name = '\xe9'\n", b"\0", b"a" + b"+a" * 50_000):
        path.write_bytes(text)
        assert [finding.severity for finding in check_scripts([str(path)])] == ["severe"]
    for missing in (str(tmp_path), str(tmp_path / "none"), "a\0b"):
        with pytest.raises(ConfigurationError, match="cannot read the script"):
            check_scripts([missing])


def test_our_examples_are_well():
    assert check_scripts([str(path) for path in sorted((ROOT / "examples").glob("*.py"))]) == []
