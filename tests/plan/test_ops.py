# SPDX-License-Identifier: Apache-2.0
"""The planner's list of ops for a preset is the one that the engine records when it trains it."""

import itertools

import pytest
import torch
from support.models import seeded
from support.planned_engine import DEVICE, LINK
from support.planned_trace import planned_trace
from support.sampling import few
from torch.utils.checkpoint import checkpoint

from fullshard.core.presets import Transformer
from fullshard.core.schedule import Op
from fullshard.core.strategy import Precision, Prefetch, ShardingStrategy
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.decoder import Decoder
from fullshard.plan.model.shape import shape_of
from fullshard.plan.run import Recompute, Run, Wrap
from fullshard.plan.step.script import write_script
from fullshard.plan.step.units import unit_paths
from fullshard.testing import LocalWorld
from fullshard.torch import FullyShardedDataParallel, tracing
from fullshard.torch.step.tracker import ensure_tracker
from fullshard.train.torch.models import GPT

SHAPE = Transformer(3, 8, 2, 1, 12, 11, context=4)
TIED = Transformer(2, 8, 2, 2, 12, 11, context=4, tied=True)
PREFETCHES = [
    Prefetch(0, 0),
    Prefetch(1, 0),
    Prefetch(),
    Prefetch(2, 2, 2),
    Prefetch(1, 1, 1, least_bytes=5000),
]
CASES = [
    *itertools.product(ShardingStrategy, PREFETCHES, [Wrap.BLOCK], [SHAPE], [False]),
    *itertools.product(ShardingStrategy, [Prefetch(2, 1)], [Wrap.PART], [SHAPE, TIED], [False]),
    *itertools.product(ShardingStrategy, [Prefetch()], [Wrap.BLOCK_AND_ENDS], [TIED], [True]),
    *itertools.product(list(ShardingStrategy)[:2], PREFETCHES[:3], [Wrap.BLOCK], [SHAPE], [True]),
    (ShardingStrategy.FULL_SHARD, Prefetch(), Wrap.NONE, SHAPE, True),
]


def recomputed(forward):
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def engine_trace(comm, shape, run, paths):
    model = seeded(lambda: GPT(shape))
    if run.recompute is not Recompute.NONE:
        for block in model.blocks:
            block.forward = recomputed(block.forward)
    chosen = {model.get_submodule(path) for path in paths if path}
    where = comm
    if run.strategy.sharding.sharded and run.strategy.sharding.replicated:
        first = comm.rank // 2 * 2
        where = comm.subgroup((first, first + 1)), comm.subgroup((comm.rank % 2, comm.rank % 2 + 2))
    wrapped = FullyShardedDataParallel(
        model,
        where,
        run.strategy,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen,
    )
    ensure_tracker(wrapped).set_prefetch(run.prefetch)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        with tracing(wrapped) as trace:
            wrapped(torch.zeros(1, 4, dtype=torch.long)).float().square().mean().backward()
    return [(each.op, each.unit, each.live_bytes) for each in trace]


@pytest.mark.parametrize(
    "case",
    few(CASES),
    ids=lambda case: "-".join(
        [case[0].name, ".".join(map(str, vars(case[1]).values())), case[2].value]
    ),
)
def test_the_ops_of_a_preset_are_those_of_the_engine(case):
    strategy, prefetch, wrap, shape, recompute = case
    hybrid = strategy.sharding.sharded and strategy.sharding.replicated
    run = Run(
        strategy=strategy,
        replicas=2 if hybrid else 1,
        wrap=wrap,
        prefetch=prefetch,
        precision=Precision(),
        recompute=Recompute.FULL if recompute else Recompute.NONE,
    )
    model, world = Decoder("preset", shape_of(shape)), 4
    cluster = Cluster(DEVICE, world, world, LINK, LINK)
    paths = unit_paths(model, wrap)
    script = write_script(model, run, cluster)
    planned = [
        (op.kind.value, script.units[op.unit].path or "(root)")
        for op in script.lines
        if isinstance(op, Op)
    ]
    for found in LocalWorld(world).run(lambda comm: engine_trace(comm, shape, run, paths)):
        assert [each[:2] for each in found if each[0] != "fill"] == planned
    assert len(planned) == sum(each.op != "fill" for each in planned_trace(script, run, cluster))
