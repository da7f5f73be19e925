# SPDX-License-Identifier: Apache-2.0
"""Pictures of a step over time, from the ops that the engine's own schedule gives.

Four equal blocks: forward takes 2 units of time, backward 4, a gather and a reduce 1.6 each.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from canvas import Picture, picture

from fullshard.core.schedule import Event, Moment, OpKind, UnitPolicy, compile_step
from fullshard.core.strategy import Prefetch

BLOCKS = 4
ONE_AHEAD = Prefetch()
SECONDS = {OpKind.GATHER: 1.6, OpKind.REDUCE: 1.6, OpKind.ALL_REDUCE: 1.6}
COMPUTE = {Moment.FORWARD_END: 2.0, Moment.BACKWARD_END: 4.0}
LANES = {
    "gather": (OpKind.GATHER, "shard"),
    "reduce": (OpKind.REDUCE, "grad"),
    "all-reduce": (OpKind.ALL_REDUCE, "good"),
}
NAMES = "ABCD"


@dataclass
class Replayed:
    """Bars by lane as (start, stop, kind, text), and (time, full, gradients) in blocks."""

    bars: list[tuple[str, float, float, str, str]] = field(default_factory=list)
    changes: list[tuple[float, int, int]] = field(default_factory=list)
    end: float = 0.0

    def memory(self) -> list[tuple[float, int, int]]:
        full = grads = 0
        levels = []
        for time, more_full, more_grads in sorted(self.changes, key=lambda change: change[0]):
            full, grads = full + more_full, grads + more_grads
            levels.append((time, full, grads))
        return levels


def replay(
    policy: UnitPolicy, prefetch: Prefetch = ONE_AHEAD, seconds: dict[OpKind, float] = SECONDS
) -> Replayed:
    """Carry a step out in time: a lane does one thing after another, compute waits for gathers."""
    order = range(BLOCKS)
    events = [
        Event(moment, unit)
        for unit in order
        for moment in (Moment.FORWARD_BEGIN, Moment.FORWARD_END)
    ]
    events += [
        Event(moment, unit)
        for unit in reversed(order)
        for moment in (Moment.BACKWARD_BEGIN, Moment.BACKWARD_END)
    ]
    events.append(Event(Moment.STEP_END))
    step, now = Replayed(), 0.0
    free = dict.fromkeys(LANES, 0.0)
    done: dict[tuple[OpKind, int], float] = {}
    for event, ops in zip(
        events, compile_step(events, dict.fromkeys(order, policy), prefetch), strict=True
    ):
        if event.moment in COMPUTE:
            forward = event.moment is Moment.FORWARD_END
            start, now = now, now + COMPUTE[event.moment]
            text = NAMES[event.unit] + ("" if forward else "'")
            step.bars.append(("compute", start, now, "full" if forward else "away", text))
            if not forward:
                step.changes.append((start, 0, 1))
        for op in ops:
            for lane, (kind, shade) in LANES.items():
                if op.kind is kind:
                    after = done.get((OpKind.REDUCE, op.unit), 0.0)
                    start = max(now, free[lane], after if kind is OpKind.ALL_REDUCE else 0.0)
                    free[lane] = done[kind, op.unit] = start + seconds[kind]
                    step.bars.append((lane, start, free[lane], shade, NAMES[op.unit]))
                    if kind is OpKind.GATHER:
                        step.changes.append((start, 1, 0))
                    if kind is OpKind.REDUCE:
                        step.changes.append((free[lane], 0, -1))
            if op.kind is OpKind.AWAIT_GATHER:
                now = max(now, done[OpKind.GATHER, op.unit])
            if op.kind is OpKind.AWAIT_REDUCE:
                last = OpKind.ALL_REDUCE if policy.replicated else OpKind.REDUCE
                now = max(now, done[last, op.unit])
            if op.kind is OpKind.FREE:
                step.changes.append((now, -1, 0))
    step.end = max(now, *free.values())
    return step


def streams(step: Replayed, told: str, note: str) -> Picture:
    lanes = [lane for lane in ("gather", "compute", *LANES) if any(b[0] == lane for b in step.bars)]
    lanes = list(dict.fromkeys(lanes))
    p = Picture(760, 30 + 48 * len(lanes), told)
    scale = 640 / step.end
    for number, lane in enumerate(lanes):
        p.text(20, 46 + 48 * number, lane, "title")
        for where, start, stop, kind, text in step.bars:
            if where == lane:
                x, width = 105 + start * scale, (stop - start) * scale
                p.box(round(x, 1), 24 + 48 * number, round(width - 1, 1), 34, kind, text)
    p.note(note)
    return p


@picture
def step_full_shard() -> Picture:
    return streams(
        replay(UnitPolicy()),
        "A step of FULL_SHARD: gathers ahead of forward and backward, reduces behind backward",
        "FULL_SHARD. Blocks A to D forward (orange), then D' to A' backward (red). While A "
        "computes, B is gathered; while C' computes, B is gathered again and D's gradients are "
        "reduced. D, whose backward follows its forward, is gathered once.",
    )


@picture
def step_shard_grad_op() -> Picture:
    return streams(
        replay(UnitPolicy(reshard_after_forward=False)),
        "A step of SHARD_GRAD_OP: blocks are gathered once and kept until their backward",
        "SHARD_GRAD_OP. Each block is gathered once and stays whole until its backward is over: "
        "a third less is sent, and more is held.",
    )


@picture
def step_hybrid() -> Picture:
    inside = {OpKind.GATHER: 0.7, OpKind.REDUCE: 0.7, OpKind.ALL_REDUCE: 2.4}
    return streams(
        replay(UnitPolicy(replicated=True), seconds=inside),
        "A step of HYBRID_SHARD: gathers and reduces inside a host, an all-reduce between hosts",
        "HYBRID_SHARD. Gathers and reduces stay on the fast links of a host; the all-reduce of a "
        "block's slices between hosts runs while the blocks below it compute.",
    )


@picture
def step_prefetch() -> Picture:
    slow = dict.fromkeys(SECONDS, 3.0)
    p = Picture(760, 240, "The same step with no, one and two blocks gathered ahead on a slow link")
    ends = []
    for number, ahead in enumerate((0, 1, 2)):
        step = replay(UnitPolicy(), Prefetch(ahead, ahead), slow)
        ends.append((number, ahead, step))
    scale = 600 / max(step.end for _, _, step in ends)
    for number, ahead, step in ends:
        y = 30 + number * 70
        p.text(20, y + 26, f"prefetch {ahead}", "title")
        for lane, start, stop, kind, _ in step.bars:
            height = {"gather": 0, "compute": 18, "reduce": 36}[lane]
            p.box(
                round(120 + start * scale, 1),
                y + height,
                round((stop - start) * scale, 1),
                16,
                kind,
            )
    p.note(
        "A slow link. Above gathers, in the middle computation, below reduces: one block ahead "
        "hides most of what none ahead waits for; a second one spares a gather more, gains no "
        "time here and holds a block more."
    )
    return p


@picture
def step_memory() -> Picture:
    p = Picture(760, 260, "Whole parameters and gradients that a rank holds over a step")
    kinds = (
        ("FULL_SHARD", UnitPolicy()),
        ("SHARD_GRAD_OP", UnitPolicy(reshard_after_forward=False)),
    )
    steps_ = [(name, replay(policy)) for name, policy in kinds]
    scale = 560 / max(step.end for _, step in steps_)
    for number, (name, step) in enumerate(steps_):
        base = 120 + number * 110
        p.text(20, base - 20, name, "title")
        p.arrow((160, base), (745, base))
        levels = [*step.memory(), (step.end, 0, 0)]
        for (start, full, grads), (stop, *_rest) in pairwise(levels):
            x, width = round(165 + start * scale, 1), round((stop - start) * scale, 1)
            if width:
                p.box(x, base - 18 * full, width, 18 * full, "full") if full else None
                top = base - 18 * (full + grads)
                p.box(x, top, width, 18 * grads, "grad") if grads else None
    p.note(
        "In blocks, beyond what rests: whole parameters (orange) and whole gradients (violet), "
        "until their reduce is over. Forward is the first third of the time."
    )
    return p
