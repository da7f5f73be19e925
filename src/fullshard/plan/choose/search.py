# SPDX-License-Identifier: Apache-2.0
"""Ranks the configurations of a space by predicted speed, within a memory budget."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fullshard.core.errors import ConfigurationError
from fullshard.core.strategy import Prefetch
from fullshard.core.text import bytes_text
from fullshard.plan.choose.settings import describe
from fullshard.plan.choose.space import SearchSpace
from fullshard.plan.cluster.cluster import Cluster
from fullshard.plan.cluster.devices import fitted_spread
from fullshard.plan.memory import resting_memory
from fullshard.plan.model.operations import Model
from fullshard.plan.predict import Prediction, predict
from fullshard.plan.run import Loss, Run, Wrap
from fullshard.plan.step.script import Script, Walked, write_script
from fullshard.plan.step.units import PlannedUnit, units_of

_REFINED = 4  # of the best, how many are tried with other units and prefetch
_STEP = 0.01
_USABLE = 0.95  # of a device's memory: fragments have the rest
_UNIT_KEY = ("strategy", "replicas", "wrap", "offload")


@dataclass(frozen=True)
class Rejected:
    """A configuration that cannot be, with its reason."""

    run: Run
    reason: str


@dataclass(frozen=True)
class Choice:
    """The result of a search: ``ranked`` from the fastest on, ``rejected`` with reasons.

    ``budget_bytes`` is what one device may hold. ``tried`` counts all predictions.
    """

    model: Model
    cluster: Cluster
    budget_bytes: int
    ranked: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]
    tried: int

    @property
    def best(self) -> Prediction:
        """The fastest that fits."""
        return self.ranked[0]


def search(
    model: Model, space: SearchSpace, cluster: Cluster, *, budget_bytes: int | None = None
) -> Choice:
    """Try the configurations of ``space`` and rank those that fit.

    Micro-batches grow until one does not fit; state goes to the host only if nothing fits without;
    the best are tried with other units and prefetch. ``budget_bytes`` is by default that of
    `usable_bytes`. Raises `ConfigurationError` if nothing fits, with the least memory that any
    candidate needs.
    """
    space.check(cluster)
    budget = usable_bytes(cluster) if budget_bytes is None else budget_bytes
    if budget <= 0:
        raise ConfigurationError(f"a memory budget must be above 0 bytes, got {budget}")
    trial = _Trial(model, cluster, budget)
    for structure in space.structures(cluster):
        trial.first_that_fits(space, structure)
    if not trial.fitting:
        raise ConfigurationError(_floor(trial, model, cluster, budget))
    best = sorted(trial.fitting.values(), key=_speed)[:_REFINED]
    for prediction in best:
        for run in space.refinements(prediction.run):
            trial.grow([run])
    ranked = tuple(sorted(trial.fitting.values(), key=_speed))
    return Choice(model, cluster, budget, ranked, tuple(trial.rejected), trial.tried)


def usable_bytes(cluster: Cluster) -> int:
    """Return the bytes of a device that a choice may fill."""
    return int(cluster.device.memory_bytes * _USABLE)


def _speed(prediction: Prediction) -> tuple[float, int, int]:
    """Sort the fastest first; of those told as fast the smallest, then the simplest."""
    run = prediction.run
    changes = (run.wrap is not Wrap.BLOCK) + (run.prefetch != Prefetch()) + (run.replicas > 1)
    return -told_speed(prediction), prediction.memory.peak_bytes, changes


def told_speed(prediction: Prediction) -> float:
    """Return tokens/s of one device as they are told: in steps of 1%, to three digits.

    Finer differences are far within every interval.
    """
    steps = round(math.log(prediction.tokens_per_s) / _STEP)
    return float(f"{math.exp(steps * _STEP):.3g}")


def least_memory(ranked: Sequence[Prediction]) -> Prediction:
    """The smallest of those that are as fast as the first, but for the spread of like runs.

    What else makes an interval wide, machine and loop, is the same for all of them.
    """
    slowest_s = ranked[0].step_s * math.exp(fitted_spread()) / ranked[0].tokens_per_step
    equals = [each for each in ranked if each.step_s / each.tokens_per_step <= slowest_s]
    return min(equals, key=lambda each: each.memory.peak_bytes)


class _Trial:
    """Predictions so far; units are made once for runs that differ only in their batch."""

    def __init__(self, model: Model, cluster: Cluster, budget: int):
        self.model, self.cluster, self.budget = model, cluster, budget
        self.fitting: dict[Run, Prediction] = {}
        self.rejected: list[Rejected] = []
        self.least: Prediction | None = None
        self.tried = 0
        self._units: dict[tuple[object, ...], tuple[PlannedUnit, ...]] = {}
        self._scripts: dict[tuple[object, ...], Script] = {}

    def grow(self, runs: Iterable[Run]) -> bool:
        """Predict ``runs`` in turn until one does not fit; returns True if one did."""
        fitted = False
        for run in runs:
            if run not in self.fitting and not self._try(run):
                break
            fitted = True
        return fitted

    def first_that_fits(self, space: SearchSpace, structure: Run) -> None:
        """Try larger units before smaller ones, and state on the device before the host."""
        for level in space.offloading(structure):
            if self._rests_too_large(level):
                continue
            for wrapped in space.wrapping(level):
                found = [
                    self.grow(space.batches(run, self.cluster))
                    for run in space.recomputing(wrapped)
                ]
                if any(found):
                    return

    def _rests_too_large(self, run: Run) -> bool:
        """True, and told, if model state alone is more than the budget."""
        self.tried += 1
        resting = resting_memory(units_of(self.model, run, self.cluster), run).device_bytes
        if resting > self.budget:
            needed, given = bytes_text(resting), bytes_text(self.budget)
            reason = f"needs {needed} of {given} for model state alone"
            self.rejected.append(Rejected(run, reason))
        return resting > self.budget

    def _try(self, run: Run) -> bool:
        self.tried += 1
        try:
            script = self._script_of(run)
            prediction = predict(self.model, run, self.cluster, script=script)
        except ConfigurationError as error:
            self.rejected.append(Rejected(run, str(error)))
            return False
        memory = prediction.memory
        if self.least is None or memory.peak_bytes < self.least.memory.peak_bytes:
            self.least = prediction
        if memory.peak_bytes > self.budget:
            needed, given = bytes_text(memory.peak_bytes), bytes_text(self.budget)
            self.rejected.append(Rejected(run, f"needs {needed} of {given}: {memory.cause}"))
            return False
        self.fitting[run] = prediction
        return True

    def _script_of(self, run: Run) -> Script:
        """Units do not depend on the batch, nor does the order in which things happen."""
        key = tuple(getattr(run, name) for name in _UNIT_KEY)
        if key not in self._units:
            self._units[key] = units_of(self.model, run, self.cluster)
        if isinstance(self.model, Walked):
            return write_script(self.model, run, self.cluster, units=self._units[key])
        order = (*key, run.recompute, run.prefetch)
        if order not in self._scripts:
            units = self._units[key]
            self._scripts[order] = write_script(self.model, run, self.cluster, units=units)
        return replace(self._scripts[order], calls=self.model.calls(run))


def _floor(trial: _Trial, model: Model, cluster: Cluster, budget: int) -> str:
    least = trial.least
    if least is None:
        return trial.rejected[0].reason
    memory = least.memory
    more = -(-memory.resting_bytes // budget) * cluster.devices
    way_out = (
        f"{more} devices or more" if memory.resting_bytes > budget else "a smaller micro-batch"
    )
    if least.run.loss is Loss.PLAIN and 2 * memory.peak["logits and loss"] > memory.peak_bytes:
        way_out += ", a loss that keeps less (loss fused or chunked)"
    return (
        f"{model.name} does not fit into {bytes_text(budget)} on each of {cluster.devices} devices "
        f"in any of {trial.tried} ways; the least is {bytes_text(memory.peak_bytes)} with "
        f"{describe(least.run)}, of which {bytes_text(memory.resting_bytes)} is model state "
        f"({memory.cause}). Take {way_out}, shorter sequences, or devices with more memory"
    )


def pareto(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    """Leave out all that are neither faster nor smaller than another; from the fastest on."""
    front: list[Prediction] = []
    for each in sorted(predictions, key=_speed):
        if not front or each.memory.peak_bytes < front[-1].memory.peak_bytes:
            front.append(each)
    return tuple(front)
