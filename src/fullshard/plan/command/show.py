# SPDX-License-Identifier: Apache-2.0
"""The command's findings, for people: tables and bars as wide as the terminal."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from fullshard.core.text import bytes_text, seconds_text
from fullshard.plan.choose.changes import Answer, Change
from fullshard.plan.choose.search import Choice, least_memory, pareto, told_speed
from fullshard.plan.choose.settings import describe, offload_name, strategy_name
from fullshard.plan.command.recipe import code_of
from fullshard.plan.predict import Prediction
from fullshard.plan.run import Loss, Run
from fullshard.plan.step.interval import Unknown

_BAR = 24
_STEP = "step, how sure"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_black")


def show_choice(console: Console, choice: Choice, tokens: float, top: int) -> None:
    """The ranked table, the best one in detail, and why others were rejected."""
    console.print(_title(choice))
    console.print(_ranked(choice, top))
    console.print(_details(choice.best, tokens))
    console.print(_rejections(choice))
    for title, fsdp2 in (("for your own script", False), ("the same with fully_shard", True)):
        console.print(Text(f"\n{title}", style="bold"))
        code = code_of(choice.best, fsdp2=fsdp2)
        console.print(Syntax(code, "python", background_color="default", word_wrap=True))


def _title(choice: Choice) -> RenderableType:
    cluster, model = choice.cluster, choice.model
    run = choice.best.run
    numel = model.spec(replace(run, expert_parallel=1)).numel * run.tensor_parallel
    hosts = f"{cluster.hosts} host{'s' if cluster.hosts > 1 else ''}"
    return Text.assemble(
        (model.name, "bold"),
        f": {_count(numel)} parameters, sequences of {run.sequence or model.context:,}, "
        f"{cluster.devices:,} x {cluster.device.title} in {hosts}",
    )


def _ranked(choice: Choice, top: int) -> RenderableType:
    """A row for each configuration; what all of them share is said below."""
    table = Table(
        title=f"what fits into {bytes_text(choice.budget_bytes)}, fastest first "
        f"({len(choice.ranked)} of {choice.tried} tried; * on the Pareto front)",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    shown = _distinct(choice.ranked)[:top]
    front = {id(each) for each in pareto(choice.ranked)}
    choices = {
        "strategy": [_short_strategy(each.run) for each in shown],
        "units": [each.run.wrap.value for each in shown],
        "batch": [_batch(each.run) for each in shown],
        "recompute": [each.run.recompute.value for each in shown],
        "offload": [offload_name(each.run.offload) for each in shown],
        "prefetch": [f"{each.run.prefetch.forward}/{each.run.prefetch.backward}" for each in shown],
    }
    columns = {
        "": ["*" if id(each) in front else "" for each in shown],
        **{head: cells for head, cells in choices.items() if len(set(cells)) > 1},
        "GiB": [f"{each.memory.peak_bytes / 2**30:.1f}" for each in shown],
        _STEP: [_interval(each) for each in shown],
        "tokens/s": [_speed(each) for each in shown],
        "MFU": [f"{each.mfu:.1%}" for each in shown],
    }
    for head in columns:
        right = head in ("GiB", _STEP, "tokens/s", "MFU")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    for number, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, style="bold" if number == 0 else "")
    shared = [f"{head} {cells[0]}" for head, cells in choices.items() if len(set(cells)) == 1]
    lines: list[RenderableType] = [table]
    if shared:
        lines.append(Text(f"all of them: {', '.join(shared)}", style="dim"))
    smallest = least_memory(choice.ranked)
    if smallest is not choice.best:
        lines.append(
            Text(
                f"nearly as fast, with the least memory: {describe(smallest.run)} "
                f"({bytes_text(smallest.memory.peak_bytes)}, {_speed(smallest)} tokens/s)"
            )
        )
    return Group(*lines)


def _batch(run: Run) -> str:
    return f"{run.micro_batch}" + (f" x{run.accumulate}" if run.accumulate > 1 else "")


def _speed(prediction: Prediction) -> str:
    told = told_speed(prediction)
    return f"{told:,.0f}" if told >= 100 else f"{told:.3g}"


def _distinct(ranked: Sequence[Prediction]) -> list[Prediction]:
    """The best units and prefetch of each strategy, batch, recomputation and offload."""
    found: dict[tuple[object, ...], Prediction] = {}
    for each in ranked:
        run = each.run
        key = (run.strategy, run.replicas, run.micro_batch, run.recompute, run.offload)
        found.setdefault(key, each)
    return list(found.values())


def _details(best: Prediction, tokens: float) -> RenderableType:
    memory, device = best.memory, best.cluster.device
    low, high = (each / 2**30 for each in best.memory_interval)
    interval = f"{seconds_text(best.interval.low_s)} to {seconds_text(best.interval.high_s)}"
    peak = f"{bytes_text(memory.peak_bytes)} of {bytes_text(device.memory_bytes)}"
    found: list[RenderableType] = [
        Text(describe(best.run), style="bold"),
        Text(f"memory {peak} (90%: {low:.1f} to {high:.1f} GiB), most at {memory.cause}"),
        *_on_the_loss(best),
        _bars(dict(memory.peak), memory.peak_bytes, bytes_text),
        *_on_the_host(best),
        Text(
            f"step {seconds_text(best.step_s)} ({best.interval.share:.0%}: {interval}); "
            f"all devices {_count(best.cluster_tokens_per_s)} "
            f"tokens/s, {_count(best.tokens_per_step)} tokens a step; {best.watts:,.0f} W a device"
        ),
        _bars(best.parts, best.step_s, seconds_text),
    ]
    for each in best.interval.unknowns:
        found.append(Text(f"widens the interval: {each.name} ({_ends(each)})", style="dim"))
    if tokens:
        days = tokens / best.cluster_tokens_per_s / 86_400
        found.append(
            Text(
                f"{_count(tokens)} tokens: {days:,.1f} days, {best.device_hours(tokens):,.0f} "
                f"device-hours, {best.energy_kwh(tokens):,.0f} kWh of the devices alone"
            )
        )
    return Panel(Group(*found), title="the best", title_align="left")


def _on_the_loss(best: Prediction) -> Iterator[Text]:
    """Say that a loss that is not told is taken for the one that needs most, if that matters."""
    logits = best.memory.peak["logits and loss"]
    if best.run.loss is Loss.PLAIN and logits > 0.05 * best.memory.peak_bytes:
        yield Text(
            "the loss may keep logits and their float32 copy: --loss freed, compiled, fused or "
            "chunked needs less",
            style="dim",
        )


def _on_the_host(best: Prediction) -> Iterator[Text]:
    if best.host_bytes:
        rank = bytes_text(best.memory.host_bytes)
        yield Text(
            f"memory of each host for what is offloaded: {bytes_text(best.host_bytes)} "
            f"({rank} for each device)"
        )


def _bars(parts: Mapping[str, float], whole: float, text: "object") -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for number, (name, value) in enumerate(parts.items()):
        share = value / whole if whole else 0.0
        if share < 0.001:
            continue
        bar = "█" * round(share * _BAR) or "▏"
        said = text(int(value)) if text is bytes_text else seconds_text(value)
        colour = _COLOURS[number % len(_COLOURS)]
        table.add_row(f"  {name}", Text(bar, style=colour), said, f"{share:.1%}")
    return table


def _rejections(choice: Choice) -> RenderableType:
    """The first rejection of each strategy: what is largest, and why."""
    seen: dict[str, str] = {}
    for each in choice.rejected:
        key = f"{strategy_name(each.run)} {each.run.recompute.value}"
        seen.setdefault(key, f"{describe(each.run)}: {each.reason}")
    if not seen:
        return Text("nothing was rejected", style="dim")
    lines = [Text(line, style="dim") for line in list(seen.values())[:5]]
    more = len(choice.rejected) - len(lines)
    if more > 0:
        lines.append(Text(f"and {more} more (--json tells all)", style="dim"))
    return Padding(Group(Text("rejected", style="bold"), *lines), (1, 0, 0, 1))


def show_answers(console: Console, key: str, answers: Sequence[Answer], base: Prediction) -> None:
    """Print what-if answers, beside the speed of the best."""
    table = Table(title=f"what if {key} were", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column(key, overflow="fold")
    for head in ("memory", "fits", _STEP, "tokens/s", "of the best", "MFU"):
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("at the peak", overflow="fold")
    for each in answers:
        found = each.prediction
        if found is None:
            table.add_row(each.value, "", "no", "", "", "", "", each.reason)
            continue
        table.add_row(
            each.value,
            f"{found.memory.peak_bytes / 2**30:.1f} GiB",
            "yes" if found.fits else "NO",
            _interval(found),
            _speed(found),
            f"{found.tokens_per_s / base.tokens_per_s:.2f}",
            f"{found.mfu:.1%}",
            found.memory.cause.rpartition(": ")[2],
        )
    console.print(table)


def show_change(console: Console, asked: Prediction, change: Change | None) -> None:
    """The run as asked, that does not fit, and the smallest change with which it does."""
    memory = asked.memory
    console.print(
        f"{describe(asked.run)} needs {bytes_text(memory.peak_bytes)} of "
        f"{bytes_text(asked.cluster.device.memory_bytes)}: {memory.cause}"
    )
    if change is None:
        console.print("no three changes make it fit")
        return
    found = change.prediction
    console.print(
        f"the smallest change that fits: [bold]{'; '.join(change.words)}[/bold] "
        f"({bytes_text(found.memory.peak_bytes)}, {found.tokens_per_s:,.0f} tokens/s a device)"
    )


def _short_strategy(run: Run) -> str:
    name = strategy_name(run).removeprefix("_").replace("HYBRID_SHARD", "HYBRID")
    return f"{name} x{run.replicas}" if name.startswith("HYBRID") else name


def _interval(prediction: Prediction) -> str:
    """Such as ``0.84-1.7 s 86%``: one unit for both ends, and the share of runs inside."""
    found = prediction.interval
    low, high, sure = found.low_s, found.high_s, f"{found.share:.0%}"
    if high < 1:
        return f"{low * 1e3:.0f}-{high * 1e3:.0f} ms {sure}"
    if high >= 10:
        return f"{low:,.0f}-{high:,.0f} s {sure}"
    return f"{low:.{2 if low < 1 else 1}f}-{high:.1f} s {sure}"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _ends(unknown: Unknown) -> str:
    """Such as ``-9%, +12%``: by how much a step may take less and more."""
    ends = ((-math.expm1(-unknown.sooner), "-"), (math.expm1(unknown.later), "+"))
    return ", ".join(f"{sign}{share:.0%}" for share, sign in ends if share >= 0.005)
