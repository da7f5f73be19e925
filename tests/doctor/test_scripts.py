# SPDX-License-Identifier: Apache-2.0
"""Each mistake is found in its line, and not in the script that does it right."""

import textwrap
from pathlib import Path

import pytest

from fullshard.doctor.scripts.linter import check_script, check_scripts

ROOT = Path(__file__).resolve().parents[2]

HEAD = """\
import os
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
"""
# What is sharded, so that there is something to do wrong.
FSDP1 = HEAD + "model = FSDP(Net())\noptimizer = torch.optim.AdamW(model.parameters())\n"
FSDP2 = HEAD + "model = Net()\nfully_shard(model)\noptim = torch.optim.SGD(model.parameters())\n"


def findings(head, text):
    return check_script(head + textwrap.dedent(text), "train.py")


def assert_found(head, text, severity, words):
    """One finding, in the line that ends in ``# here``."""
    whole = head + textwrap.dedent(text)
    lines = [n for n, line in enumerate(whole.splitlines(), 1) if line.endswith("# here")]
    assert len(lines) == 1
    found = findings(head, text)
    assert [(each.severity, each.where) for each in found] == [(severity, f"train.py:{lines[0]}")]
    assert words in found[0].what
    assert found[0].means
    assert found[0].fix


ON_ONE_RANK = {
    "a state dict": """
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "model.pt")  # here
        """,
    "in a context": """
        if rank == 0 and epoch % 5 == 0:
            with FSDP.state_dict_type(model, kind, config):
                state = model.state_dict()  # here
        """,
    "a summon": """
        if self.local_rank == 0:
            with FSDP.summon_full_params(model):  # here
                print(model.weight)
        """,
    "a function for one GPU": """
        class Trainer:
            def save(self):
                torch.save(model.state_dict(), "model.pt")

            def train(self):
                if self.gpu_id == 0 and epoch % 2 == 0:
                    self.save()  # here
        """,
    "a full tensor": """
        is_main = int(os.environ["RANK"]) == 0
        if is_main:
            print(next(model.parameters()).full_tensor())  # here
        """,
    "a checkpoint": """
        if not dist.is_initialized() or dist.get_rank() == 0:
            dcp.save({"model": 1}, checkpoint_id="here")  # here
        """,
    "a barrier": """
        if accelerator.is_main_process:
            dist.barrier()  # here
        """,
    "after a return": """
        def save(model, rank):
            if rank != 0:
                return
            torch.save(get_model_state_dict(model), "model.pt")  # here
        """,
    "after a continue": """
        for epoch in range(3):
            if rank:
                continue
            dist.all_reduce(loss)  # here
        """,
    "in a function": """
        def save(model):
            state = model.state_dict()
            torch.save(state, "model.pt")

        if not rank:
            save(model)  # here
        """,
    "two functions deep": """
        class Trainer:
            def save(self):
                return get_optimizer_state_dict(model, optimizer)
            def checkpoint(self):
                self.save()
            def run(self):
                if self.rank == 0:
                    self.checkpoint()  # here
        """,
    "a forward": """
        def evaluate(model, batches):
            return [model(batch) for batch in batches]

        if int(os.environ.get("RANK", 0)) == 0:
            evaluate(model, batches)  # here
        """,
    "the other ranks": """
        if rank == 0:
            print("done")
        else:
            dist.broadcast(weights, 0)  # here
        """,
    "an expression": """
        state = model.state_dict() if rank == 0 else None  # here
        """,
    "a decorator": """
        @rank_zero_only
        def save(path):
            torch.save(model.state_dict(), path)  # here
        """,
    "loaded too late": """
        if rank == 0:
            model.load_state_dict(torch.load("model.pt", weights_only=True))  # here
        """,
    "a condition with and": """
        rank == 0 and dist.barrier()  # here
        """,
}


@pytest.mark.parametrize("text", ON_ONE_RANK.values(), ids=ON_ONE_RANK)
def test_collectives_on_some_ranks(text):
    assert_found(FSDP1, text, "severe", "() runs on ")


ON_ALL_RANKS = {
    "written on one": """
        state = model.state_dict()
        if rank == 0:
            torch.save(state, "model.pt")
        """,
    "both arms": """
        if rank == 0:
            state = model.state_dict()
        else:
            model.state_dict()
        """,
    "first one, then the others": """
        if rank != 0:
            dist.barrier()
        download()
        if rank == 0:
            dist.barrier()
        """,
    "a model that is not sharded": """
        if rank == 0:
            plain = Net()
            plain.load_state_dict(state)
            torch.save(plain.state_dict(), "model.pt")
        """,
    "loaded on one rank, then sharded": """
        def main():
            model = Net()
            if rank == 0:
                model.load_state_dict(torch.load("model.pt", weights_only=True))
                print(model(batch))
            model = FSDP(model, sync_module_states=True)
        """,
    "a function that loads before": """
        def load(model, rank):
            if rank != 0:
                return
            model.load_state_dict(torch.load("model.pt", weights_only=True))
        """,
    "a group of its own": """
        if rank == 0:
            dist.barrier(group=alone)
            dist.all_reduce(loss, dist.ReduceOp.SUM, alone)
        """,
    "messages": """
        if rank == 0:
            dist.send(weights, 1)
        elif rank == 1:
            dist.recv(weights, 0)
        """,
    "a scheduler's state": """
        if rank == 0:
            torch.save(scheduler.state_dict(), "scheduler.pt")
        """,
    "not distributed": """
        if local_rank == -1:
            torch.save(model.state_dict(), "model.pt")
        """,
    "another kind of rank": """
        if lora_rank == 0:
            model(batch)
        if rank == world_size - 1 or everywhere:
            model(batch)
        """,
    "told once": """
        def train(model, rank):
            loss = model(batch).sum()
            dist.all_reduce(loss)
            if rank == 0:
                print(f"loss {loss.item()}, {model.training}, {len(list(model.parameters()))}")

        train(model, rank)
        """,
    "the end of the others": """
        def save(model, rank):
            state = get_model_state_dict(model)
            if rank != 0:
                return
            torch.save(state, "model.pt")
        """,
    "a function that a thread calls": """
        if rank == 0:
            callbacks.append(lambda: dist.barrier())
        """,
}


@pytest.mark.parametrize("text", ON_ALL_RANKS.values(), ids=ON_ALL_RANKS)
def test_what_all_ranks_call_is_well(text):
    assert findings(FSDP1, text) == []


def test_a_barrier_is_seen_without_sharding_a_state_dict_is_not():
    head = "import torch.distributed as dist\n"
    found = findings(head, "if rank == 0:\n    dist.barrier()\n    model.state_dict()\n")
    assert [each.severity for each in found] == ["severe", "note"]
    assert "dist.barrier()" in found[0].what
    assert "nothing of FSDP" in found[1].what


def test_a_file_that_only_saves():
    """The model comes from elsewhere; what is imported tells that it is sharded."""
    text = """
        def checkpoint(model, optimizer):
            if dist.get_rank() == 0:
                with FSDP.state_dict_type(model, kind, config):
                    state = model.state_dict()
                torch.save({"model": state, "optimizer": optimizer.state_dict()}, "all.pt")
        """
    found = findings(HEAD, text)
    assert [each.severity for each in found] == ["severe", "severe"]
    assert "model.state_dict()" in found[0].what
    assert "optimizer.state_dict()" in found[1].what


WRONG = {
    "optimizer, then FSDP": (
        HEAD,
        """
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
        model = FSDP(model)
        """,
        "severe",
        "the optimizer is made before model is sharded",
    ),
    "optimizer, then the blocks": (
        HEAD,
        """
        model = Net()
        optimizer = bnb.optim.AdamW8bit([{"params": model.parameters()}])  # here
        for number, block in enumerate(model.blocks):
            fully_shard(block)
        """,
        "severe",
        "the optimizer is made before model is sharded",
    ),
    "optimizer, then a function that shards": (
        HEAD,
        """
        def shard(net):
            for block in net.blocks:
                fully_shard(block)
            fully_shard(net)

        def main():
            model = Net()
            optimizer = torch.optim.Adam(model.parameters())  # here
            shard(model)
        """,
        "severe",
        "the optimizer is made before model is sharded",
    ),
    "optimizer of a list, then FSDP": (
        HEAD,
        """
        model = Net()
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-3)  # here
        model = FSDP(model)
        """,
        "severe",
        "the optimizer is made before model is sharded",
    ),
    "optimizer of parts, then the whole": (
        HEAD,
        """
        model = Net()
        optimizer = torch.optim.Adam([{"params": model.head.parameters()}])  # here
        fully_shard(model)
        """,
        "severe",
        "the optimizer is made before model is sharded",
    ),
    "state in a dict": (
        FSDP1,
        """
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if dist.get_rank() == 0:
            torch.save(saved, "all.pt")  # here
        """,
        "severe",
        "saved is written on one rank",
    ),
    "parts to one file": (
        FSDP2,
        """
        for epoch in range(3):
            torch.save(model.state_dict(), f"{epoch}.pt")  # here
        """,
        "severe",
        "model.state_dict() is written by every rank to one file",
    ),
    "no set_epoch in a while": (
        FSDP1,
        """
        sampler = DistributedSampler(data)  # here
        while epoch < 3:
            train()
        """,
        "warning",
        "no set_epoch",
    ),
    "moved by an assignment": (
        HEAD,
        "net = Net().to(device)  # here\nnet = FSDP(net)\n",
        "warning",
        "moved to the device before",
    ),
    "moved in place": (
        HEAD,
        "net = Net()\nnet.cuda()  # here\nfor part in net.parts:\n    fully_shard(part)\n"
        "fully_shard(net)\n",
        "warning",
        "moved to the device before",
    ),
    "moved in the call": (
        HEAD,
        "net = FSDP(Net().to(rank))  # here\n",
        "warning",
        "moved to the device before",
    ),
    "no set_epoch": (
        HEAD,
        """
        sampler = DistributedSampler(dataset)  # here
        for epoch in range(3):
            train(model, DataLoader(dataset, sampler=sampler))
        """,
        "warning",
        "no set_epoch",
    ),
    "no sampler": (
        FSDP1,
        "loader = DataLoader(dataset, batch_size=8, shuffle=True)  # here\n",
        "warning",
        "without a sampler",
    ),
    "optimizer's part": (
        FSDP1,
        """
        if rank == 0:
            torch.save({"optimizer": optimizer.state_dict()}, "state.pt")  # here
        """,
        "severe",
        "is written on one rank",
    ),
    "optimizer's part, taken before": (
        FSDP1,
        """
        parts = optimizer.state_dict()
        if rank == 0:
            torch.save({"step": 3, "optimizer": parts}, "state.pt")  # here
        """,
        "severe",
        "parts is written on one rank",
    ),
    "DTensors": (
        FSDP2,
        """
        state = model.state_dict()
        if rank == 0:
            torch.save(state, "state.pt")  # here
        """,
        "severe",
        "state is written on one rank",
    ),
    "the module inside": (FSDP1, "model.module(batch)  # here\n", "severe", "goes past"),
    "its forward": (FSDP1, "model.module.forward(batch)  # here\n", "severe", "goes past"),
    "forward without hooks": (FSDP2, "model.forward(batch)  # here\n", "severe", "goes past"),
    "pickle": (
        FSDP1,
        'torch.load("model.pt", weights_only=False)  # here\n',
        "warning",
        "weights_only=False",
    ),
    "perhaps pickle": (FSDP1, 'torch.load("model.pt")  # here\n', "note", "without weights_only"),
    "a name": (
        HEAD,
        "FSDP(Net(), sharding_strategy=FSDP.ShardingStrategy.FULL_SHARD)  # here\n",
        "note",
        "FSDP.ShardingStrategy is not in PyTorch",
    ),
    "an argument": (
        HEAD,
        "FSDP(Net(), cpu_offload=CPUOffload(offload_optimizer=True))  # here\n",
        "note",
        "CPUOffload(offload_optimizer=...) is not in PyTorch",
    ),
    "a global rank as device": (
        HEAD,
        """
        rank = dist.get_rank()
        model = FSDP(Net(), device_id=rank)  # here
        """,
        "warning",
        "rank chooses a GPU, but counts the ranks of all hosts",
    ),
    "a global rank in torch.device": (
        HEAD,
        """
        device = torch.device("cuda", int(os.environ["RANK"]))
        model = FSDP(Net(), device_id=torch.device("cuda", int(os.environ["RANK"])))  # here
        """,
        "warning",
        "chooses a GPU",
    ),
    "a global rank made current": (
        FSDP1,
        "torch.cuda.set_device(dist.get_rank())  # here\n",
        "warning",
        "dist.get_rank() chooses a GPU",
    ),
    "a plain scaler": (
        FSDP1,
        'scaler = torch.amp.GradScaler("cuda")  # here\n',
        "warning",
        "a plain GradScaler for an FSDP model",
    ),
    "clipped before unscale_": (
        FSDP2,
        """
        def step(self, loss):
            self.scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here
            self.scaler.unscale_(optim)
            self.scaler.step(optim)
        """,
        "severe",
        "clipped while they carry the factor of self.scaler",
    ),
    "clipped and never unscaled": (
        FSDP1,
        """
        amp = ShardedGradScaler()
        for batch in loader:
            amp.scale(model(batch).sum()).backward()
            model.clip_grad_norm_(1.0)  # here
            amp.step(optimizer)
        """,
        "severe",
        "clipped while they carry the factor of amp",
    ),
    "a break on one rank": (
        FSDP1,
        """
        for batch in loader:
            loss = model(batch).sum()
            loss.backward()
            if rank == 0 and stopper.is_done(loss):
                break  # here
        """,
        "severe",
        "this break ends the loop on one rank only",
    ),
    "a break of its own loss": (
        FSDP1,
        """
        while True:
            loss = criterion(model(next(batches)), targets)
            if not torch.isfinite(loss):
                break  # here
            loss.backward()
        """,
        "severe",
        "this break ends the loop where not torch.isfinite(loss)",
    ),
    "a local norm": (
        FSDP1,
        "nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # here\n",
        "note",
        "clip_grad_norm_ on an FSDP model",
    ),
    "no Python": ("", "def main(:  # here\n", "severe", "cannot read the script"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_mistakes(case):
    head, text, severity, words = case
    assert_found(head, text, severity, words)


RIGHT = {
    "parts to files of their own": """
        path = f"part{dist.get_rank()}.pt"
        torch.save(optimizer.state_dict(), path)
        """,
    "a path from outside": """
        def save(path):
            torch.save(optimizer.state_dict(), path)
        """,
    "a plain model on one rank": """
        def evaluate(net, batch):
            return net(batch)

        def main():
            model = FSDP(Net())
            plain = Net()
            if dist.get_rank() == 0:
                evaluate(plain, batch)
        """,
    "optimizer after": """
        net = Net()
        for block in net.blocks:
            fully_shard(block)
        fully_shard(net)
        optimizer = torch.optim.Adam(net.parameters())
        """,
    "parameters that are followed": """
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        net = FSDP(net, use_orig_params=True)
        """,
    "one run after the other": """
        net = FSDP(Net())
        optimizer = torch.optim.Adam(net.parameters())
        net = Net()
        net = FSDP(net)
        """,
    "one way or the other": """
        net = Net()
        if plain:
            optimizer = torch.optim.Adam(net.parameters())
        else:
            net = FSDP(net)
            optimizer = torch.optim.Adam(net.parameters())
        """,
    "another model": """
        optimizer = torch.optim.Adam(head.parameters())
        body = FSDP(Net())
        """,
    "another dtype, the host": """
        device = torch.device("cpu")
        net = FSDP(Net().to(torch.bfloat16))
        other = FSDP(Net().to(device))
        third = FSDP(Net().to("meta"))
        """,
    "moved after": """
        with torch.device("meta"):
            net = Net()
        fully_shard(net)
        net.to_empty(device="cuda")
        batch = batch.to(device)
        """,
    "set_epoch": """
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler)
        for epoch in range(3):
            loader.sampler.set_epoch(epoch)
        """,
    "one epoch, or no shuffling": """
        tests = DataLoader(dataset, sampler=DistributedSampler(dataset, shuffle=False))
        for epoch in range(3):
            evaluate(tests)
        """,
    "samples cut by hand": """
        mine = dataset[rank::world_size]
        loader = DataLoader(mine, shuffle=True)
        plain = DataLoader(tests, batch_size=8)
        third = DataLoader(dataset, **arguments)
        """,
    "whole optimizer state": """
        state = FSDP.optim_state_dict(model, optimizer)
        if rank == 0:
            torch.save({"optimizer": state}, "state.pt")
        """,
    "gathered entries": """
        parts = model.state_dict()
        whole = {name: part.full_tensor() for name, part in parts.items()}
        if rank == 0:
            torch.save(whole, "state.pt")
        """,
    "a local rank as device": """
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        net = FSDP(Net(), device_id=local_rank)
        """,
    "a rank that mp.spawn has given": """
        def main(rank, world_size):
            torch.cuda.set_device(rank)
            net = FSDP(Net(), device_id=rank)
        """,
    "scalers that are right": """
        scaler = ShardedGradScaler()
        off = torch.amp.GradScaler(enabled=False)
        def step(loss):
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        """,
    "a break that all ranks take": """
        for batch in loader:
            loss = model(batch).sum()
            loss.backward()
            dist.all_reduce(loss)
            if loss.item() < 0.1:
                break
        for batch in loader:
            own_loss = model(batch).sum()
            if any_rank(own_loss.isnan()):
                break
        """,
    "a break from a loop without collectives": """
        for line in lines:
            if rank == 0:
                break
        for batch in loader:
            if not batch:
                break
            model(batch)
        """,
    "names and modules of others": """
        ddp.module(batch)
        model(batch)
        options.CPUOffload(offload_optimizer=True)
        torch.load("model.pt", weights_only=True)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        """,
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_what_is_right_is_not_told(text):
    assert findings(FSDP1, text) == []


def test_files_are_read_as_python_reads_them(tmp_path):
    marked, latin = tmp_path / "marked.py", tmp_path / "latin.py"
    marked.write_bytes(b"\xef\xbb\xbffrom torch.distributed.fsdp import wrap\n")
    latin.write_bytes(
        b"# coding: latin-1\nname = '\xe9'\nfrom torch.distributed.fsdp import wrap\n"
    )
    assert check_scripts([str(marked), str(latin)]) == []
    latin.write_bytes(b"# coding: nonsense\n")
    (found,) = check_scripts([str(latin)])
    assert found.severity == "severe"


def test_of_files_given_together_one_that_shards_is_enough(tmp_path):
    paths = [tmp_path / f"{name}.py" for name in ("shards", "data", "metrics")]
    paths[0].write_text("from torch.distributed.fsdp import wrap\n")
    for path in paths[1:]:
        path.write_text("import torch\n")
    assert check_scripts([str(path) for path in paths]) == []
    (found,) = check_scripts([str(path) for path in paths[1:]])
    assert found.what == "nothing of FSDP in these files"


def test_a_condition_is_negated_once():
    text = """
        if not self.is_main:
            return_early()
        else:
            print(model.state_dict())
        if not rank == 0:
            sys.exit()
        dist.barrier()
        """
    first, second = findings(FSDP1, text)
    assert "(line 13: self.is_main)" in first.what
    assert "(line 17: rank == 0)" in second.what
    (found,) = findings(FSDP1, "if rank == 0:\n    print(1)\nelse:\n    dist.barrier()\n")
    assert "rank != 0)" in found.what


def test_what_is_too_deep_to_follow_is_said():
    (found,) = check_script("total = " + "+".join(["a"] * 5000))
    assert found.severity == "warning"
    assert "too deep" in found.what


def test_our_names_are_fine_in_a_script_for_fullshard():
    head = (
        "import torch\nfrom fullshard.torch import CPUOffload, FullyShardedDataParallel as FSDP\n"
    )
    text = "model = FSDP(Net(), FSDP.ShardingStrategy, CPUOffload(offload_optimizer=True))\n"
    text += "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    assert findings(head, text) == []


def test_our_examples_are_without_warnings():
    paths = [str(path) for path in sorted((ROOT / "examples").glob("*.py"))]
    assert paths
    assert [each for each in check_scripts(paths) if each.severity != "note"] == []
