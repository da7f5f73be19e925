# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of batches end together, and train as one process would."""

import pytest
import torch
from support.beside import params_of
from support.models import loss_of, make, make_batches
from support.threads import on_ranks
from support.training import shard
from support.world import on_processes

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalWorld
from fullshard.torch.comm.uneven_inputs import any_rank, pad_to_longest, stop_together

DTYPE = torch.float64
LEARNING_RATE = 0.1


def sized_batches(sizes):
    """Batches of the given numbers of samples, cut out of the same data."""
    inputs, targets = make_batches("nested", 1, sum(sizes), DTYPE)[0]
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def steps_of_one_process(batches, counts):
    """For each step what the ranks together have: rank r the first ``counts[r]`` of its batches."""
    steps = []
    for i in range(max(counts)):
        parts = [mine[i] for mine, n in zip(batches, counts, strict=True) if i < n]
        steps.append((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
    return steps


def train(model, steps):
    """``steps`` are ((inputs, targets), weight)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for (inputs, targets), weight in steps:
        (loss_of(model(inputs), targets) * weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def compare(runs, steps):
    plain = train(make("nested", DTYPE), [(step, 1.0) for step in steps])
    for found in runs:
        torch.testing.assert_close(found, params_of(plain), rtol=0, atol=1e-12)


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (2, 1, 3)], ids=str)
def test_stop_together(counts, door):
    batches = [sized_batches([2] * 4) for _ in counts]

    def body(comm):
        model = shard(make("nested", DTYPE), "nested", comm, door=door)
        mine = batches[comm.rank][: counts[comm.rank]]
        return params_of(train(model, [(step, 1.0) for step in stop_together(mine, comm)]))

    fewest = [min(counts)] * len(counts)
    compare(LocalWorld(len(counts)).run(body), steps_of_one_process(batches, fewest))


@pytest.mark.parametrize("door", ["wrapper", "function"])
@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (2, 1, 3), (0, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (5, 1, 3, 2)], ids=["even", "ragged"])
def test_pad_to_longest(sizes, counts, door):
    """Batches of rank r are as large as ``sizes`` says, beginning with the r-th."""
    batches = [sized_batches([*sizes[r:], *sizes[:r]]) for r in range(len(counts))]
    size_of = None if len(set(sizes)) == 1 else lambda batch: len(batch[0])

    def body(comm):
        model = shard(make("nested", DTYPE), "nested", comm, door=door)
        mine = batches[comm.rank][: counts[comm.rank]]
        spare = batches[comm.rank][0]
        return params_of(train(model, pad_to_longest(mine, comm, size_of=size_of, spare=spare)))

    compare(LocalWorld(len(counts)).run(body), steps_of_one_process(batches, counts))


def test_the_next_batch_is_asked_for_before_the_step():
    """So that its vote is under way meanwhile; and an iterator is not asked again after its end."""

    def body(comm):
        log = []

        def batches():
            for i in range(2 - comm.rank):
                log.append(f"fetch {i}")
                yield i
            log.append("end")

        for batch, _ in pad_to_longest(batches(), comm):
            log.append(f"step {batch}")
        return log

    assert LocalWorld(2).run(body) == [
        ["fetch 0", "fetch 1", "step 0", "end", "step 1"],
        ["fetch 0", "end", "step 0", "step 0"],
    ]


def test_a_rank_without_any_batch():
    def body(comm, pad):
        if not pad:
            return list(stop_together(["a"] * comm.rank, comm))
        with pytest.raises(UsageError, match=r"ranks \[0\] have not a single batch"):
            list(pad_to_longest(["a"] * comm.rank, comm))
        return "raised"

    assert LocalWorld(3).run(lambda comm: body(comm, pad=False)) == [[], [], []]
    assert LocalWorld(3).run(lambda comm: body(comm, pad=True)) == ["raised"] * 3
    assert LocalWorld(2).run(lambda comm: list(pad_to_longest([], comm))) == [[], []]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@on_ranks(2)
def test_a_bad_size_is_refused_on_all_ranks(comm, bad):
    with pytest.raises(ConfigurationError, match="size_of must give finite numbers"):
        list(pad_to_longest(["a"], comm, size_of=lambda batch: bad if comm.rank else 1.0))


def test_generation_whose_sequences_end_apart():
    """Rank r's ends after 2 + 3r tokens; the ranks run the model together until the last one."""

    def greedy(model, tokens, steps, more):
        calls = 0
        with torch.inference_mode():
            while more(calls < steps):
                following = model(tokens)[:, -1].argmax(-1, keepdim=True)
                if calls < steps:
                    tokens = torch.cat([tokens, following], 1)
                calls += 1
        return tokens.tolist(), calls

    def body(comm):
        model = shard(make("gpt"), "gpt", comm).eval()
        start = torch.tensor([[comm.rank, 1]])
        return greedy(model, start, 2 + 3 * comm.rank, lambda flag: any_rank(flag, comm))

    for rank, (tokens, calls) in enumerate(LocalWorld(3).run(body)):
        steps = 2 + 3 * rank
        start = torch.tensor([[rank, 1]])
        assert tokens == greedy(make("gpt").eval(), start, steps, lambda flag: flag)[0]
        assert calls == 8


@on_processes(3)
def test_gloo_processes(group):
    """The last rank has two batches, the others one."""
    last = group.rank() == 2
    mine = ["a", "b"] if last else ["a"]
    assert list(stop_together(mine, group)) == ["a"]
    second = ("b", 3.0) if last else ("a", 0.0)
    assert list(pad_to_longest(mine, group)) == [("a", 1.0), second]
    assert any_rank(last, group)
