# SPDX-License-Identifier: Apache-2.0
"""Units that only some ranks run: losses, gradients and weights are those of one process."""

import itertools
import random
import weakref
from functools import partial

import pytest
import torch
from support.beside import grid
from support.optional_parts import (
    PARTS,
    MixtureOfExperts,
    Model,
    Recomputing,
    Residuals,
    add_gradients,
    as_recomputing,
    check,
    check_gradients,
    compare,
    mark_differently,
    patterns,
    routes,
    sharded,
    texts,
    update,
)
from support.threads import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.core.errors import ConfigurationError, UsageError
from fullshard.testing import LocalComm, LocalWorld
from fullshard.torch import (
    CPUOffloadPolicy,
    fully_shard,
    mark_optional,
    set_prefetch,
    set_separate_reduce_scatter_group,
    tracing,
    using,
)


def by(door, **options):
    return lambda comm: sharded(comm, door, **options)


def on_one_communicator(comm):
    model = sharded(comm, "fully_shard")
    set_prefetch(model, 0, 0)
    set_separate_reduce_scatter_group(model, False)
    return model


MODES = {
    "hybrid": lambda comm: sharded(grid(comm), "fully_shard"),
    "offload": lambda comm: sharded(comm, "fully_shard", offload_policy=CPUOffloadPolicy()),
    "elements": lambda comm: sharded(comm, "fully_shard", align="element"),
    "whole matrices": lambda comm: sharded(comm, "fully_shard", align="matrix"),
    "kept full": lambda comm: sharded(comm, "fully_shard", reshard_after_forward=False),
    "smaller groups": lambda comm: sharded(comm, "fully_shard", reshard_after_forward=2),
    "one communicator": on_one_communicator,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_with_optional_parts(mode):
    check(4, [[patterns(4, 0, most=2)]], MODES[mode])


@pytest.mark.parametrize(
    ("again", "shared", "announce"),
    [(False, True, ()), (True, True, ()), (True, False, (0, 1, 2))],
)
def test_experts_of_a_list_run_in_any_order_on_any_rank(again, shared, announce):
    steps, make = [[routes(3, seed)] for seed in range(3)], partial(MixtureOfExperts, again, shared)
    check(3, steps, lambda comm: make().shard(comm), make(), announce=announce)


@pytest.fixture
def questions(monkeypatch):
    """The labels of what rank 0 asks, as it is asked."""
    asked, all_reduce = [], LocalComm.all_reduce

    def counted(comm, tensors, op="sum", label=""):
        if comm.rank == 0 and ("question" in label or "may reach" in label):
            asked.append(label)
        return all_reduce(comm, tensors, op, label)

    monkeypatch.setattr(LocalComm, "all_reduce", counted)
    return asked


@pytest.mark.parametrize("announced", [False, True])
def test_questions_are_counted(questions, announced):
    def body(comm):
        model, asked = sharded(comm, "fully_shard"), []
        for used in ({}, {"eye": comm.rank}, {"eye": 1}):
            before = len(questions)
            runs = dict.fromkeys(PARTS, 0) | used if announced else {}
            with using(model, **runs):
                loss = model(texts(2, 0)[comm.rank], used).sum()
            loss.backward()
            asked.append(len(questions) - before)
        return asked

    first, _ = LocalWorld(2).run(body)
    if announced:
        # Before the embedding, which everybody runs, and before the part.
        assert first == [1, 2 + 3 + 1, 2 + 3]
    else:
        # Before the embedding, two blocks, and the end; for the part, its layers and its end; and,
        # as ranks have run different units, for what a backward may reach.
        assert first == [4, 4 + 4 + 1, 4 + 4]


@pytest.mark.parametrize("announce", [(0, 1, 2), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("again", [False, True])
def test_ranks_announce_what_they_will_run(announce, again):
    steps = [[patterns(3, s, most=2)] for s in range(3)]
    check(3, steps, by("wrapper", again=again), Model(again), announce=announce)


@on_ranks(2)
def test_less_than_was_announced_is_told_on_all_ranks(comm):
    model = sharded(comm, "fully_shard")
    told = r"2 runs .* announced by using\(...\); on this rank: " + ("none", "'ear'")[comm.rank]
    runs = {"eye": 0, "ear": 2 * comm.rank, "hand": 0}
    with pytest.raises(UsageError, match=told), using(model, **runs):
        model(texts(2, 0)[comm.rank], {})
    with using(model, eye=0, ear=0, hand=0):  # the step after is not harmed
        model(texts(2, 0)[comm.rank], {}).sum().backward()


@pytest.mark.parametrize("others", [0, 1])
def test_more_than_was_announced_is_told(others):
    def body(comm):
        model = sharded(comm, "fully_shard")
        with using(model, eye=others * comm.rank, ear=0, hand=0):
            model(texts(2, 0)[comm.rank], {"eye": 1})

    with pytest.raises(UsageError, match="'eye' runs more often in a forward of unit"):
        LocalWorld(2).run(body)


@on_ranks(2)
def test_announcements_that_mean_nothing_are_refused(comm):
    model = sharded(comm, "wrapper")
    for runs, told in [
        ({"nose": 1}, "has no such module"),
        ({"blocks": 1}, "no unit there is optional"),
        ({"eye": -1}, "expected how often"),
        ({"eye": torch.tensor(True)}, "expected how often"),
    ]:
        with pytest.raises(ConfigurationError, match=told), using(model, **runs):
            raise AssertionError("not reached")


@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_pattern_of_parts_gives_what_one_process_has(ranks, door):
    check(ranks, [[patterns(ranks, seed)] for seed in range(3)], by(door))


@pytest.mark.parametrize("no_sync", [False, True])
def test_micro_batches_use_different_parts(no_sync):
    steps = [[patterns(2, 10 * seed + batch) for batch in range(3)] for seed in range(2)]
    check(2, steps, by("fully_shard"), no_sync=no_sync)


OF_USERS = {
    "fully_shard": lambda comm: sharded(comm, "fully_shard", mean_over="users"),
    "wrapper": lambda comm: sharded(comm, "wrapper", mean_over="users"),
    "hybrid": lambda comm: sharded(grid(comm), "fully_shard", mean_over="users"),
    "recomputed": lambda comm: sharded(comm, "fully_shard", again=True, mean_over="users"),
}


@pytest.mark.parametrize("door", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_run_parts_with_gradients_and_without(ranks, door):
    steps = [[patterns(ranks, 2 * s + batch, least=-1) for batch in range(2)] for s in range(3)]
    check(ranks, steps, by(door, again=ranks == 3), Model(ranks == 3))


@pytest.mark.parametrize(("way", "no_sync"), [*((way, way == "fully_shard") for way in OF_USERS)])
def test_gradients_are_means_over_users(way, no_sync):
    steps = [[patterns(4, batch, most=2) for batch in range(2)]]
    check(4, steps, OF_USERS[way], Model(way == "recomputed"), "users", no_sync=no_sync)


def test_a_mean_over_users_is_refused_of_forwards_with_other_users():
    def body(comm):
        model = sharded(comm, "fully_shard", mean_over="users")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(batch, eye):
            return model(texts(2, batch)[comm.rank], {"eye": eye}).square().mean()

        with pytest.raises(UsageError, match=r"'eye.*used by different numbers of ranks"):
            (loss(0, 1) + loss(1, comm.rank)).backward()
        (loss(0, comm.rank) + loss(1, 0)).backward()  # what nobody uses counts nothing
        first, second = loss(0, 1), loss(1, comm.rank)
        first.backward()
        second.backward()
        return update(model, optimizer)

    model = Model()
    for rank in range(2):
        # Both parts of gradients of the eye that rank 1 alone has used count twice.
        for batch, eye, weight in [(0, rank, 2), (1, 0, 1), (0, 1, 1), (1, rank, 2)]:
            loss = model(texts(2, batch)[rank], {"eye": eye}).square().mean() / 2
            add_gradients(model, loss, {"eye": weight})
    expected = update(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for history in LocalWorld(2).run(body):
        compare([history], [expected])


def test_a_mark_may_go_back_to_the_mean_over_ranks():
    def grads(model, rank):
        model(texts(2, 0)[rank], {"eye": rank}).square().mean().backward()
        return update(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def body(comm):
        model = sharded(comm, "fully_shard", mean_over="users")
        first = grads(model, comm.rank)
        mark_optional(model.eye)
        return first["eye.first.weight"], grads(model, comm.rank)["eye.first.weight"]

    for users, ranks in LocalWorld(2).run(body):
        assert users.norm() > 0
        torch.testing.assert_close(users, 2 * ranks, rtol=0, atol=1e-12)


@on_ranks(2)
def test_marks_of_another_mean_are_refused(comm):
    model = sharded(comm, "fully_shard", mark=False)
    with pytest.raises(ConfigurationError, match='expected "ranks" or "users"'):
        mark_optional(model.eye, mean_over="all")
    mark_optional(model.eye, mean_over=("ranks", "users")[comm.rank])
    with pytest.raises(ConfigurationError, match="means over users of"):
        model(texts(2, 0)[comm.rank], {})


BACKWARDS = {
    "of the sum": lambda first, second: (first + second).backward(),
    "in turn": lambda first, second: (first.backward(), second.backward()),
    "in reverse": lambda first, second: (second.backward(), first.backward()),
}


@pytest.mark.parametrize("backwards", BACKWARDS)
@pytest.mark.parametrize("seed", range(2))
def test_two_forwards_before_their_backwards(backwards, seed):
    used = [patterns(3, 2 * seed + forward, most=2) for forward in range(2)]

    def backward(model, rank):
        for _ in range(2):
            losses = [model(texts(3, n)[rank], used[n][rank]).square().mean() for n in range(2)]
            BACKWARDS[backwards](*losses)

    check_gradients(3, backward, by("fully_shard"))


@pytest.mark.parametrize("recomputing", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_backward_goes_through_a_kept_graph_again(seed, recomputing):
    """In any order with that of another forward, and a forward between."""
    used = [patterns(2, 3 * seed + forward, most=2) for forward in range(3)]
    turns = [*random.Random(seed).sample([0, 0, 1, 1], 4), 2]

    def backwards(model, rank):
        outputs = [model(texts(2, n)[rank], used[n][rank]) for n in range(2)]
        for place, n in enumerate(turns):
            if n == 2:
                outputs.append(model(texts(2, n)[rank], used[n][rank]))
            loss = ((place + 1) * outputs[n]).square().mean()
            loss.backward(retain_graph=n in turns[place + 1 :])

    def ahead(comm):
        model = as_recomputing(comm) if recomputing else sharded(comm, "fully_shard")
        set_prefetch(model, seed % 2, seed % 2)
        return model

    check_gradients(2, backwards, ahead, Recomputing() if recomputing else Model())


def test_what_would_be_recomputed_goes_with_its_graph():
    def body(comm):
        model = Residuals(saves=False, together=False).shard(comm)
        gone = []
        model.embed.register_forward_hook(lambda _m, _i, out: gone.append(weakref.ref(out)))
        for backward in (False, True):
            loss = model(texts(2, 0)[comm.rank], [[comm.rank], []]).sum()
            if backward:
                loss.backward()
            del loss
        return [each() for each in gone]

    assert LocalWorld(2).run(body) == [[None, None], [None, None]]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("embed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_backward_goes_through_two_roots(seed, embed, beside):
    """One behind the other or side by side; a rank may leave out all that it would run first."""
    used = [[patterns(2, 4 * seed + 2 * step + n, most=2) for n in range(2)] for step in range(2)]

    def backward(low, high, rank):
        for step in range(2):
            text = texts(2, 10 * seed + step)[rank]
            below = low(text, used[step][0][rank])
            above = high(text if beside else text + below[:, :3], used[step][1][rank])
            (above.square().mean() + (below.mean() if beside else 0)).backward()

    def ahead(comm):
        roots = [sharded(comm, "fully_shard", embed=embed) for _ in range(2)]
        for root in roots:
            set_prefetch(root, seed % 2, seed % 2)
        return roots

    check_gradients(2, backward, ahead, Model(), Model())


def test_all_patterns_of_two_parts_on_two_ranks():
    uses = [dict(zip(PARTS, use, strict=False)) for use in itertools.product((0, 1), repeat=2)]
    steps = [[[here, there]] for here in uses for there in uses]
    check(2, steps, by("fully_shard"))


def test_a_frozen_model_behind_a_trained_part_is_reached_on_all_ranks():
    def frozen(model):
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith("eye"))
        return model

    def backward(model, rank):
        for step in range(3):
            used = {"eye": int(rank == 1 or step == 1)}
            loss = model(texts(2, step)[rank], used).square().mean()
            if loss.requires_grad:
                loss.backward()

    check_gradients(2, backward, lambda comm: frozen(sharded(comm, "fully_shard")), frozen(Model()))


def test_evaluation_asks_too():
    def body(comm):
        model = sharded(comm, "fully_shard")
        with torch.no_grad():
            return [model(texts(2, 0)[comm.rank], use) for use in ({"eye": comm.rank}, {})]

    model = Model()
    for rank, outputs in enumerate(LocalWorld(2).run(body)):
        for output, use in zip(outputs, ({"eye": rank}, {}), strict=True):
            torch.testing.assert_close(output, model(texts(2, 0)[rank], use).detach())


@on_ranks(2)
def test_units_that_are_not_marked_must_run_on_all_ranks(comm):
    model = sharded(comm, "fully_shard")
    rank = comm.rank
    model.forward = lambda text: model.blocks[rank](model.embed(text))
    with pytest.raises(UsageError, match="ranks have come to different units"):
        model(texts(2, 0)[rank])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_parts_with_units_inside_are_recomputed_as_a_whole(frozen, prefetch):
    steps = [[patterns(3, seed, most=2)] for seed in range(4)]

    def ahead(comm):
        model = as_recomputing(comm, frozen)
        set_prefetch(model, prefetch, prefetch)
        return model

    check(3, steps, ahead, Recomputing().freeze() if frozen else Recomputing())


def test_a_part_may_checkpoint_around_one_unit_and_evaluation_come_between():
    used = [[{"eye": 1}, {"ear": 1}], [{"eye": 1, "hand": 1}, {}]]

    def checkpointed(comm):
        model = sharded(comm, "fully_shard")
        for part in (model.eye, model.ear, model.hand):
            part.forward = lambda x, part=part: part.second(
                checkpoint(lambda y: torch.tanh(part.first(y)), x, use_reentrant=False)
            )
        return model

    def backward(model, rank):
        for step in range(2):
            loss = model(texts(2, step)[rank], used[step][rank]).square().mean()
            with torch.no_grad():
                model(texts(2, 7)[rank], used[1 - step][rank])
            loss.backward()

    check_gradients(2, backward, checkpointed)


@on_ranks(2)
def test_ranks_recompute_a_part_alike(comm):
    model = as_recomputing(comm, frozen=False)
    model.forward = (Recomputing if comm.rank else Model).forward.__get__(model)
    model.again = False
    with pytest.raises(UsageError, match="'eye' runs in a checkpoint on 1"):
        model(texts(2, 0)[comm.rank], {"eye": 1})


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("saves", "prefetch"), [(False, 0), (True, 0), (True, 1)])
def test_ranks_recompute_at_one_place_whatever_they_have_saved(saves, prefetch, together):
    def ahead(comm):
        model = Residuals(saves, together).shard(comm)
        set_prefetch(model, prefetch, prefetch)
        return model

    check(2, [[routes(2, seed)] for seed in range(4)], ahead, Residuals(saves, together))


@on_ranks(2)
def test_marks_are_refused_where_they_mean_nothing(comm):
    with pytest.raises(UsageError, match="holds no unit"):
        mark_optional(Model())
    alone = fully_shard(nn.Linear(3, 3), mesh=comm, optional=True)
    with pytest.raises(UsageError, match="no unit encloses it"):
        alone(torch.ones(1, 3))
    model = sharded(comm, "fully_shard")
    model(texts(2, 0)[comm.rank], {}).sum().backward()
    with pytest.raises(UsageError, match="is the root of its model"):
        mark_optional(model)
    with pytest.raises(UsageError, match=r"'eye\.first' runs outside of the forward"):
        model.eye.first(torch.ones(1, 5, dtype=torch.float64))


def test_ranks_that_mark_different_parts_are_told():
    for text in LocalWorld(2).run(mark_differently):
        assert "the ranks disagree about the units that are optional" in text
        assert "'eye' on rank 0; 'eye', 'ear' on rank 1" in text


@on_ranks(2)
def test_only_what_some_rank_runs_is_sent(comm):
    """As for a model without marks whose ranks all do the same."""

    def ops(model, rank, used):
        for _ in range(2):
            with tracing(model) as trace:
                model(texts(2, 0)[rank], used).square().mean().backward()
        return sorted((r.unit, r.op) for r in trace.records if r.op in ("gather", "reduce"))

    marked, plain = (sharded(comm, "fully_shard", mark=mark) for mark in (True, False))
    for used in ({}, dict.fromkeys(PARTS, 1)):
        assert ops(marked, comm.rank, used) == ops(plain, comm.rank, used)
    mine = {"eye": comm.rank}
    assert ops(marked, comm.rank, mine) == ops(plain, comm.rank, {"eye": 1})
