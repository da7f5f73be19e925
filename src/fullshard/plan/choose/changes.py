# SPDX-License-Identifier: Apache-2.0
"""Runs with something changed: what if, and the smallest change that makes one fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Offload, Prefetch, ShardingStrategy
from fullshard.plan.choose.search import usable_bytes
from fullshard.plan.choose.settings import KEYS, Setup, choose_one, with_setting
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import Loss, Recompute, Run, Wrap

_MOST = 3  # changes at once


@dataclass(frozen=True)
class Change:
    """A change in words, and the prediction of the run so changed."""

    words: tuple[str, ...]
    prediction: Prediction


def smallest_change(
    model: Model, run: Run, cluster: Cluster, *, budget_bytes: int | None = None
) -> Change | None:
    """The fewest changes with which ``run`` fits, of as many those that cost the least speed.

    Samples of a step stay the same. None if not even three changes are enough.
    """
    budget = usable_bytes(cluster) if budget_bytes is None else budget_bytes
    single = list(_changes(run))
    for count in range(1, _MOST + 1):
        fitting: list[Change] = []
        for chosen in combinations(single, count):
            changed = _all_of(run, chosen)
            if changed is None:
                continue
            try:
                prediction = predict(model, changed, cluster)
            except ConfigurationError:
                continue
            if prediction.memory.peak_bytes <= budget:
                fitting.append(Change(tuple(words for words, _ in chosen), prediction))
        if fitting:
            return max(fitting, key=lambda change: change.prediction.tokens_per_s)
    return None


Named = tuple[str, dict[str, object]]


def _changes(run: Run) -> Iterator[Named]:
    """Single changes that save memory: what to write, and the fields of the run."""
    if run.loss is Loss.PLAIN:
        yield "loss fused", {"loss": Loss.FUSED}
    if run.loss is not Loss.CHUNKED:
        yield "loss chunked", {"loss": Loss.CHUNKED}
    if run.recompute is Recompute.NONE and not run.offload_activations:
        yield "recompute selective", {"recompute": Recompute.SELECTIVE}
    if run.recompute is not Recompute.FULL:
        yield "recompute full", {"recompute": Recompute.FULL}
    if run.micro_batch > 1 and run.micro_batch % 2 == 0:
        half = {"micro_batch": run.micro_batch // 2, "accumulate": run.accumulate * 2}
        yield f"micro-batch {run.micro_batch // 2}, accumulated twice as often", {**half}
    if run.strategy is not ShardingStrategy.FULL_SHARD:
        yield "strategy FULL_SHARD", {"strategy": ShardingStrategy.FULL_SHARD}
    if run.replicas > 1:
        yield "one group instead of replicas", {"replicas": 1}
    if run.wrap in (Wrap.NONE, Wrap.BLOCK):
        yield "units by block+ends", {"wrap": Wrap.BLOCK_AND_ENDS}
    if run.wrap is not Wrap.PART:
        yield "units by part", {"wrap": Wrap.PART}
    if run.prefetch.forward > 1 or run.prefetch.backward > 1:
        yield "prefetch 1", {"prefetch": Prefetch()}
    if not run.offload.to_host:
        yield "optimizer on the host", {"offload": Offload(optimizer=True)}
    if not run.offload.params:
        everything = Offload(params=True, optimizer=True)
        yield "parameters and optimizer on the host", {"offload": everything}


def _all_of(run: Run, chosen: tuple[Named, ...]) -> Run | None:
    """``run`` with all of them, None if two of them change the same thing."""
    fields: dict[str, object] = {}
    for _, each in chosen:
        if fields.keys() & each.keys():
            return None
        fields.update(each)
    return replace(run, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Answer:
    """The prediction with a setting at ``value``, or the ``reason`` why that cannot be."""

    value: str
    prediction: Prediction | None
    reason: str = ""


def parse_question(text: str) -> tuple[str, tuple[str, ...]]:
    """Read ``key=a,b,c``; raises `ConfigurationError` for another form or an unknown key."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(",") if value.strip())
    if not equals or not found:
        raise ConfigurationError(f"expected key=a,b,c, got {text!r}")
    return choose_one("setting", key.strip(), KEYS), found


def what_if(model: Model, setup: Setup, key: str, values: Sequence[str]) -> tuple[Answer, ...]:
    """Predict ``setup`` with ``key`` at each of ``values``, everything else as it is."""
    return tuple(_answer(model, setup, key, value) for value in values)


def _answer(model: Model, setup: Setup, key: str, value: str) -> Answer:
    try:
        changed = with_setting(setup, key, value)
        return Answer(value, predict(model, changed.run, changed.cluster))
    except ConfigurationError as error:
        return Answer(value, None, str(error))
