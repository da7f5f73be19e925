# SPDX-License-Identifier: Apache-2.0
"""Causes that limit a run, each with its price: what the record shows, what to change, the gain.

A cause counts if it costs a part of a step that people would care for (`_LEAST`), and where ranks
are compared, if it stands out of the noise. None: the run is healthy.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fullshard.core.schedule import Event
from fullshard.core.strategy import Prefetch
from fullshard.core.text import bytes_text
from fullshard.report.measure import EXPOSED, Figure, MeasuredRun, Wanted
from fullshard.report.record import Attempt
from fullshard.report.replay import (
    Costs,
    Setting,
    as_exposed,
    costs_of,
    events_of,
    replay,
    setting_of,
)

CAUSES = (
    *("slow link", "slow rank in forward", "slow rank in backward", "slow rank", "slow data"),
    *("host-bound", "needless copies", "bad prefetch", "bad wrapping", "checkpoint stall"),
    "memory near its limit",
)
"""All that can be the matter."""

_LEAST = {
    "rank": 0.05,  # of a step that the other ranks wait for one
    "data": 0.15,
    "host": 0.25,
    "copies": 0.1,
    "exposed": 0.15,
    "checkpoint": 0.1,
    "memory": 0.92,  # of what there is
}
_TINY_BYTES, _MANY_UNITS = 2**18, 48
_GIANT = 0.6  # of all bytes in one unit
_WORTH, _SPARED = 0.05, 0.4  # of what is exposed: a change that is worth a word; bad prefetch
_OF_PHASE = 0.5  # of a rank's excess: then one unit is named
_STALL, _STALLS = 0.5, 2  # of a step that a stall takes at least, and how many are no accident
_KNOWN = {  # shares that rules speak of, or that every run has
    *(*EXPOSED, "issue", "host", "forward", "backward", "optimizer", "data", "step", "compile"),
    *("checkpoint", "evaluation", "fetch", "evict", "copy", "copies"),
}
_OF_RANK = {
    "data": "slow data",
    "host": "host-bound",
    "checkpoint": "checkpoint stall",
    "copy": "needless copies",
    "copies": "needless copies",
}


@dataclass(frozen=True)
class Diagnosis:
    """A cause, and where: ``rank`` and ``unit`` are None where it is about all of them.

    ``cost_s`` are seconds of a step, ``gain_s`` those that the ``advice`` would save, None where
    that is not known. ``others`` are further changes, with their gains, the largest first.
    """

    cause: str
    cost_s: float
    what: str
    advice: str
    rank: int | None = None
    unit: str | None = None
    gain_s: float | None = None
    others: Sequence[tuple[str, float]] = ()


def diagnose(measured: MeasuredRun) -> list[Diagnosis]:
    """Return what limits a run, the costliest first; of a run's first steps memory alone."""
    seekers: Sequence[Callable[[MeasuredRun], Iterator[Diagnosis]]]
    seekers = (
        _slow_ranks,
        _stalls,
        _slow_data,
        _checkpoints,
        _copies,
        _communication,
        _host,
        _memory,
    )
    seen: dict[tuple[str, int | None], Diagnosis] = {}
    for seek in seekers if measured.warm else (_memory,):
        for finding in seek(measured):
            seen.setdefault((finding.cause, finding.rank), finding)
    return sorted(seen.values(), key=lambda finding: -finding.cost_s)


def _percent(measured: MeasuredRun, seconds: float) -> str:
    return f"{seconds / measured.mean_step_s:.0%} of a step"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# ---- ranks beside each other --------------------------------------------------------------------


def _stands_out(measured: MeasuredRun, rank: int, wanted: Wanted) -> float:
    """Return the seconds that a rank is longer in something than others, 0 if that is noise."""
    excess: Figure = measured.excess(rank, wanted)
    least_s = _LEAST["rank"] * measured.mean_step_s
    return excess.value if excess.value > max(least_s, 4 * excess.noise) else 0.0


def _slow_ranks(measured: MeasuredRun) -> Iterator[Diagnosis]:
    """Ranks for which others wait, by what they do longer than those."""
    if len(measured.ranks) < 2:
        return
    whats = [what for what in measured.mean_shares if what not in (*EXPOSED, "issue")]
    for rank in measured.ranks:
        waited_s = measured.waited_for(rank)
        if measured.collectives and waited_s < 0.6 * _LEAST["rank"] * measured.mean_step_s:
            continue
        longer = {
            what: seconds
            for what in whats
            if (seconds := _stands_out(measured, rank, Wanted(what))) > 0
        }
        phases = [what for what in longer if what in ("forward", "backward")]
        if phases:
            main = max(phases, key=lambda what: longer[what])
            yield _slow_phase(measured, rank, main, longer[main])
        for what in longer.keys() - phases:
            where = f"in {what}" if what != "host" else "outside of units and spans"
            cause = _OF_RANK.get(what, "slow rank")
            yield _slow_rank(measured, rank, cause, where, longer[what])


def _slow_phase(measured: MeasuredRun, rank: int, main: str, cost_s: float) -> Diagnosis:
    other = "backward" if main == "forward" else "forward"
    also = measured.excess(rank, Wanted(other))
    if also.value > max(0.35 * cost_s, 2 * also.noise):
        where = "in forward and backward"
        return _slow_rank(measured, rank, "slow rank", where, cost_s + also.value)
    unit = _unit_behind(measured, rank, main, cost_s)
    where = f"in {main} of {unit}" if unit else f"in {main}, in all units"
    return _slow_rank(measured, rank, f"slow rank in {main}", where, cost_s, unit)


def _slow_rank(
    measured: MeasuredRun, rank: int, cause: str, where: str, cost_s: float, unit: str | None = None
) -> Diagnosis:
    waited_s = measured.waited_for(rank)
    others = "the others wait" if len(measured.ranks) > 2 else "the other one waits"
    what = f"rank {rank} takes {_ms(cost_s)} longer than the others {where}"
    if measured.collectives:  # else nobody knows who waited for whom
        what += f"; {others} {_ms(waited_s)} for it in each step ({_percent(measured, waited_s)})"
    return Diagnosis(cause, cost_s, what, _advice_for(rank, cause, unit), rank, unit, cost_s)


def _advice_for(rank: int, cause: str, unit: str | None) -> str:
    return {
        "slow data": f"read data ahead on rank {rank}: more workers, or files nearer to it",
        "host-bound": f"look at what else runs on the host of rank {rank}, and at its own code",
        "checkpoint stall": "let all ranks save alike, in the background",
        "needless copies": f"see what rank {rank} copies, and why others do not",
    }.get(
        cause,
        f"look at what rank {rank} computes there that others do not"
        if unit
        else f"compare the device of rank {rank} with others: clocks, heat, other programs",
    )


def _stalls(measured: MeasuredRun) -> Iterator[Diagnosis]:
    """Ranks that hold the others up for long in some steps, which no median shows."""
    if len(measured.ranks) < 2:
        return
    waits = {rank: measured.by_step(rank, Wanted(*EXPOSED)) for rank in measured.ranks}
    for rank in measured.ranks:
        others = [waits[other] for other in measured.ranks if other != rank]
        waited = [min(each) for each in zip(*others, strict=True)]
        usual_s = statistics.median(waited)
        for what in measured.mean_shares.keys() - {*EXPOSED, "issue"}:
            longer = measured.longer(rank, Wanted(what))
            stalls = [at for at, s in enumerate(longer) if s > _STALL * measured.step.value]
            lost_s = sum(longer[at] for at in stalls) / len(longer)
            others_s = sum(waited[at] - usual_s for at in stalls) / len(longer)
            least_s = _LEAST["rank"] * measured.mean_step_s
            if len(stalls) >= _STALLS and lost_s > least_s and others_s > lost_s / 2:
                cause = _OF_RANK.get(what, f"slow rank in {what}")
                cause = cause if cause in CAUSES else "slow rank"
                text = f"in {len(stalls)} of {len(longer)} steps rank {rank} stalls in {what}, and "
                text += f"the others wait: {_ms(lost_s)} of a step on average "
                text += f"({_percent(measured, lost_s)})"
                advice = _advice_for(rank, cause, None)
                yield Diagnosis(cause, lost_s, text, advice, rank, gain_s=lost_s)


def _unit_behind(measured: MeasuredRun, rank: int, what: str, excess_s: float) -> str | None:
    """Return the unit in which a rank loses most of ``excess_s``, if a step was noted by units."""
    if not measured.detailed:
        return None
    by_unit = {
        number: measured.excess(rank, Wanted(what, unit=number)).value
        for number in range(len(measured.units))
    }
    if len(by_unit) < 2:
        return None
    worst = max(by_unit, key=lambda number: by_unit[number])
    return measured.units[worst].name if by_unit[worst] > _OF_PHASE * excess_s else None


# ---- all ranks alike ----------------------------------------------------------------------------


def _slow_data(measured: MeasuredRun) -> Iterator[Diagnosis]:
    cost_s = measured.on_all_s(Wanted("data"))
    if cost_s > _LEAST["data"] * measured.mean_step_s:
        what = f"each step begins with {_ms(cost_s)} of waiting for data on all ranks"
        what += f" ({_percent(measured, cost_s)})"
        advice = "read batches ahead: more workers, prefetch, or data prepared before the run"
        yield Diagnosis("slow data", cost_s, what, advice, gain_s=cost_s)


def _checkpoints(measured: MeasuredRun) -> Iterator[Diagnosis]:
    costs = {rank: _saving_s(attempt) for rank, attempt in measured.attempts.items()}
    cost_s = max(costs.values())
    if cost_s <= _LEAST["checkpoint"] * (measured.step.value + cost_s):
        return
    middle_s = statistics.median(costs.values())
    slowest = max(costs, key=lambda rank: costs[rank])
    rank = slowest if cost_s > 1.5 * middle_s else None
    who = "all ranks" if rank is None else f"rank {rank}"
    share = cost_s / (measured.step.value + cost_s)
    what = f"checkpoints hold {who} up for {_ms(cost_s)} a step on average ({share:.0%} of the run)"
    advice = "save in the background, or less often"
    yield Diagnosis("checkpoint stall", cost_s, what, advice, rank, gain_s=cost_s)


def _saving_s(attempt: Attempt) -> float:
    spans = [*attempt.spans, *(span for step in attempt.steps for span in step.spans)]
    saving = sum(span.end_s - span.begin_s for span in spans if span.what == "checkpoint")
    return saving / len(attempt.steps)


def _copies(measured: MeasuredRun) -> Iterator[Diagnosis]:
    wanted = Wanted("fetch", "evict", "copy", "copies")
    cost_s = measured.on_all_s(wanted)
    if cost_s <= _LEAST["copies"] * measured.mean_step_s:
        return
    used = _memory_share(measured.first)
    room = f"; {1 - used:.0%} of memory was never used" if used is not None and used < 0.7 else ""
    what = f"computation waits {_ms(cost_s)} of each step for copies to and from the host"
    what += f" ({_percent(measured, cost_s)}){room}"
    advice = "keep on the device what is offloaded, or pin it so that copies overlap"
    yield Diagnosis("needless copies", cost_s, what, advice, gain_s=cost_s)


def _host(measured: MeasuredRun) -> Iterator[Diagnosis]:
    """Time outside of all that is known, and in spans of the user's own words."""
    own = [what for what in measured.mean_shares if what not in _KNOWN]
    for what in [*(["host"] if measured.by_op else []), *own]:
        cost_s = measured.on_all_s(Wanted(what))
        if cost_s > _LEAST["host"] * measured.mean_step_s:
            text = f"{_ms(cost_s)} of each step ({_percent(measured, cost_s)}) lie "
            text += "outside of units, data and optimizer on all ranks: the host's own code, or a "
            text += "loss outside of units"
            if what != "host":
                text = f"{_ms(cost_s)} of each step ({_percent(measured, cost_s)}) lie in {what!r}"
                text += " on all ranks"
            advice = "profile the loop between the model's calls; log and synchronise less often"
            yield Diagnosis("host-bound", cost_s, text, advice)


def _memory(measured: MeasuredRun) -> Iterator[Diagnosis]:
    shares = {rank: _memory_share(attempt) for rank, attempt in measured.attempts.items()}
    known = {rank: share for rank, share in shares.items() if share is not None}
    if not known:
        return
    rank = max(known, key=lambda rank: known[rank])
    if known[rank] > _LEAST["memory"]:
        what = f"rank {rank} has used {known[rank]:.0%} of its memory at its peak: the next longer "
        what += "batch, or a fragmented allocator, ends the run"
        advice = "recompute activations, take smaller micro-batches, or shard over more ranks"
        middle = statistics.median(known.values())
        one = rank if len(known) > 1 and known[rank] - middle > 0.05 else None
        yield Diagnosis("memory near its limit", 0.0, what, advice, one)


def _memory_share(attempt: Attempt) -> float | None:
    """Return the part of memory that was in use at the peak, if that is known."""
    shares = [
        each.peak_bytes / each.limit_bytes
        for step in attempt.steps
        for each in step.memory
        if each.peak_bytes is not None and each.limit_bytes
    ]
    return max(shares, default=None)


# ---- communication ------------------------------------------------------------------------------


def _communication(measured: MeasuredRun) -> Iterator[Diagnosis]:
    """Waits for the link, and the setting that would spare most of them."""
    issue_s = measured.mean_s(Wanted("issue"))
    if measured.collectives:
        sure_s, cost_s = measured.sure_link_s, measured.link_s
    else:  # nobody knows who was late: that rank waits for the link alone, and so the least
        sure_s = cost_s = measured.on_all_s(Wanted(*EXPOSED))
    sizes = [unit.full_bytes for unit in measured.units if unit.numel]
    tiny = len(sizes) > _MANY_UNITS and statistics.median(sizes) < _TINY_BYTES
    if tiny and sure_s + issue_s > _LEAST["exposed"] * measured.mean_step_s:
        cost_s += issue_s
        what = f"{len(sizes)} units of {bytes_text(int(statistics.median(sizes)))} (median) cost "
        what += f"{_ms(cost_s)} of each step ({_percent(measured, cost_s)}) in calls and waits"
        yield Diagnosis("bad wrapping", cost_s, what, "wrap whole blocks as units, not their parts")
        return
    if sure_s <= _LEAST["exposed"] * measured.mean_step_s or not sum(sizes):
        return
    yield _of_link(measured, cost_s, sizes)


def _of_link(measured: MeasuredRun, cost_s: float, sizes: Sequence[int]) -> Diagnosis:
    worst = max(measured.exposed, key=lambda unit: measured.exposed[unit], default=None)
    exposed = f"computation waits {_ms(cost_s)} of each step for the link "
    exposed += f"({_percent(measured, cost_s)})"
    if worst is not None:
        exposed += f", most for {measured.units[worst].name}"
    largest = max(measured.units, key=lambda unit: unit.full_bytes)
    if largest.full_bytes > _GIANT * sum(sizes):
        part = largest.full_bytes / sum(sizes)
        what = f"{exposed}: {largest.name} has {part:.0%} of all bytes, which travel at once"
        advice = f"wrap the blocks inside {largest.name} as units of their own"
        return Diagnosis("bad wrapping", cost_s, what, advice, None, largest.name)
    gains = sorted(_gains(measured, cost_s).items(), key=lambda each: -each[1])
    if not gains:
        advice = (
            "send less: larger batches, SHARD_GRAD_OP (reshard_after_forward=False), compression"
        )
        return Diagnosis("slow link", cost_s, exposed, advice)
    (advice, gain_s), *others = gains
    cause = "slow link"
    if advice == _AHEAD and gain_s > _SPARED * cost_s:
        cause = "bad prefetch"
        exposed += ", though there is enough to compute meanwhile: gathers begin too late"
    return Diagnosis(cause, cost_s, exposed, advice, gain_s=gain_s, others=others)


_AHEAD = "gather further ahead: set_prefetch(model, forward=2, backward=2)"
_ONCE = "keep units full from forward to backward (SHARD_GRAD_OP): one gather less"
_SHORT = 'halve what is sent: compression of gathers and reduces as "bf16", or larger batches'


def _gains(measured: MeasuredRun, exposed_s: float) -> dict[str, float]:
    """Return the seconds that changes would save, by advice, from replays of the step."""
    steps = [step for step in measured.first.steps if step.step in measured.detailed and step.ops]
    if not steps or measured.first.facts.engine != "torch":
        return {}
    events, setting = events_of(steps[-1]), setting_of(measured, steps[-1])
    costs = as_exposed(events, setting, costs_of(measured), exposed_s)
    before_s = _ends_s(events, setting, costs)
    gains = {}
    ahead = Setting(setting.policies, Prefetch(2, 2, setting.prefetch.reduces_in_flight))
    if setting.prefetch.forward < 2 or setting.prefetch.backward < 2:
        gains[_AHEAD] = before_s - _ends_s(events, ahead, costs)
    if any(policy.reshard_after_forward for policy in setting.policies.values()):
        gains[_ONCE] = before_s - _ends_s(events, setting.keeping_full(), costs)
    if not measured.first.facts.settings.get("compressed"):
        gains[_SHORT] = before_s - _ends_s(events, setting, costs.sending(0.5))
    return {advice: gain for advice, gain in gains.items() if gain > _WORTH * exposed_s}


def _ends_s(events: Sequence[Event], setting: Setting, costs: Costs) -> float:
    ends = (op.end_s for ops in replay(events, setting, costs) for op in ops)
    return max(ends, default=0.0)  # of a step in which no unit ran
