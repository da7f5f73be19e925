# SPDX-License-Identifier: Apache-2.0
"""What the user documentation shows runs, and the bytes it promises are those of the engine.

A Python block marked ``runnable`` is run on four ranks. In a table, a cell that is nothing but a
piece of code is a formula; the row must have a measurement here, and the two must agree. The
symbols are explained on ``docs/symbols.md``.
"""

import importlib
import inspect
import re
import warnings
from pathlib import Path
from textwrap import indent

import pytest
import torch
from support.beside import grid, shard
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard.torch
import fullshard.wrap
from fullshard.core.schedule.rules import State
from fullshard.testing import LocalWorld
from fullshard.torch import (
    CommunicationCompression,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    RunFolder,
    ShardingStrategy,
    fully_shard,
    resting_bytes,
    set_prefetch,
    tracing,
)
from fullshard.torch.step.managed import managed_units

DOCS = Path(__file__).parent.parent / "docs"
ALL_PAGES = sorted(DOCS.rglob("*.md"))
RUNNABLE = "```python runnable\n"  # those on JAX: tests/jax_engine/test_page.py
PAGES = [
    page for page in ALL_PAGES if RUNNABLE in page.read_text() and not page.name.startswith("jax")
]

LAYERS, WIDTH, RANK = 4, 64, 16
BF16, FP32 = torch.bfloat16, torch.float32
UNIT_BYTES = 4 * WIDTH * WIDTH  # a whole number of aligned slices: padding plays no part


def name_of(path):
    return path.relative_to(DOCS).as_posix()


# ---- examples -----------------------------------------------------------------------------------


def examples():
    for path in PAGES:
        blocks = re.findall(r"^```python runnable\n(.*?)^```", path.read_text(), re.M | re.S)
        before = ""
        for number, source in enumerate(blocks, 1):
            if "import torch\n" not in source:  # it goes on with the one before
                source = before + source
            before = source
            yield pytest.param(name_of(path), source, id=f"{name_of(path)}-{number}")


def run_example(_group, page, source):
    """Run an example on a rank; it finds the default process group of the world."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # torch's own words about DeviceMesh and the like; fullshard's are errors
        warnings.filterwarnings("ignore", module=r"torch\.")
        exec(compile(source, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "source"), list(examples()))
def test_example(gloo_world, page, source):
    gloo_world.run(4, run_example, page, source)


def test_every_python_block_is_tried():
    # By this file, by tests/plan/test_pages.py, or as lines of an example that is run.
    tried = {"index.md", "planner.md", "planner_statements.md", "howto/experts.md"}
    for page in ALL_PAGES:
        assert "```python\n" not in page.read_text() or name_of(page) in tried, page


def test_the_block_of_a_mixture_is_that_of_the_example():
    (lines,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "howto/experts.md").read_text(), re.M | re.S
    )
    assert indent(lines, " " * 8) in (DOCS.parent / "examples/experts.py").read_text()


YOUR_MODEL = """\
import torch
from torch import nn
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
model.layers = list(model)
batch_of_this_rank = lambda step: torch.full((4, 8), step % 3 + 1.0)
"""


def test_the_first_lines_of_all_train_save_and_go_on(gloo_world, tmp_path):
    (lines,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "index.md").read_text(), re.M | re.S)
    for ranks, steps in ((2, 10), (4, 20)):
        source = lines.replace("1000", str(steps)).replace("100", "5")
        source = YOUR_MODEL + source.replace('"runs/a"', repr(str(tmp_path / "run")))
        source += f"assert step == {steps - 1}\n"
        gloo_world.run_joined(ranks, run_example, None, "index.md", source)
        saved = RunFolder(tmp_path / "run")
        assert saved.newest().step == steps
    names = sorted(path.name for path in saved.path.glob("step-*"))
    assert [int(name[5:]) for name in names] == [5, 10, 15, 20]


# ---- links and names ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#]+)", path.read_text())
    for target in targets:
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_the_site_lists_every_page_once():
    listed = re.findall(r"[\w/-]+\.md", (DOCS.parent / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(name_of(path) for path in DOCS.rglob("*.md"))


def test_pictures_are_what_their_script_draws_and_every_page_on_concepts_has_some(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "pictures")
    script = importlib.import_module("draw")
    drawn = {f"{name}.svg": draw().svg() for name, draw in script.PICTURES.items()}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    shown = {page.name: page.read_text().count(".svg)") for page in (DOCS / "concepts").iterdir()}
    assert not [name for name, count in shown.items() if not count]


def test_every_name_in_the_last_column_of_the_table_of_names_exists():
    found = 0
    doors = (FullyShardedDataParallel, fully_shard, fullshard.torch.CPUOffload)
    arguments = {name for door in doors for name in inspect.signature(door).parameters}
    homes = (doors[0], fullshard.torch.FSDPModule, fullshard.torch, fullshard.wrap)
    for row in rows_of(DOCS / "names.md"):
        for name in re.findall(r"`([A-Za-z_]\w*)(?:\(|`)", row[-1]):
            known = name in arguments or name in ShardingStrategy.__members__
            assert known or any(hasattr(home, name) for home in homes), name
            found += 1
    assert found > 20


# ---- bytes and traffic --------------------------------------------------------------------------


def rows_of(path):
    """The tables' rows as lists of cells, their heads left out."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and re.match(r"\|( -+:? \|)+$", lines[number + 1])
        if line.startswith("| ") and not is_head and not re.match(r"\|( -+:? \|)+$", line):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def formulas(path):
    """(row, column, formula) of each cell that is a formula."""
    head = None
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells
        else:
            for column, cell in zip(head[1:], cells[1:], strict=False):
                code = re.fullmatch(r"`([\dPUNSBFTcrp +*/()-]+)`", cell)
                if code:
                    yield cells[0].replace("`", ""), column, code[1]


class Stack(nn.Module):
    """Equal blocks of one weight each, no parameters of its own."""

    def __init__(self, block=lambda: nn.Linear(WIDTH, WIDTH, bias=False), recompute=None):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


class WithAdapter(nn.Module):
    """A frozen weight and a trained adapter of low rank."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


BLOCKS = [f"blocks.{number}" for number in range(LAYERS)]


def by_function(comm, model, **options):
    return shard(model, comm, units=BLOCKS, **options)


def by_wrapper(comm, model, **options):
    return shard(model, comm, "wrapper", BLOCKS, **options)


def backward(model):
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    model(inputs).float().square().mean().backward()


def measure_step(model, sent):
    """The third step: what rests after backward, what is held on the way, what is sent."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    before = sent["rank 0"].total()
    with tracing(model) as trace:
        backward(model)
    at_rest = resting_bytes(model, optimizer)
    counters = 4 * len(optimizer.state)  # Adam's step numbers
    return {
        "at rest, with AdamW": at_rest.total_bytes - counters,
        "more at peak": trace.peak_bytes,
        "sent per step": sent["rank 0"].total() - before,
    }


def measure_accumulation(model, sent, start, end):
    """Four micro-batches of which ``start`` is called before the first, ``end`` before the last."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        start(model)
        sent_in, held = [], 0
        for number in range(4):
            if number == 3:
                end(model)
            before = sent["rank 0"].total()
            backward(model)
            sent_in.append(sent["rank 0"].total() - before)
            if number == 1:
                held = resting_bytes(model, optimizer).gradients_bytes
                for managed in managed_units(model):
                    held += managed.unit.transient_bytes
        optimizer.step()
        optimizer.zero_grad()
    return {
        "held between micro-batches": held,
        "sent by each": sent_in[1],
        "sent by the last": sent_in[3],
    }


def strategy(name):
    return lambda comm, model: by_wrapper(comm, model, sharding_strategy=ShardingStrategy[name])


def hybrid(name):
    return lambda comm, model: by_wrapper(
        grid(comm), model, sharding_strategy=ShardingStrategy[name]
    )


def policy(*dtypes):
    return lambda comm, model: by_function(comm, model, mp_policy=MixedPrecisionPolicy(*dtypes))


def frozen(blocks):
    def sharded(comm, model):
        for block in list(model.blocks)[blocks]:
            block.requires_grad_(False)
        return by_function(comm, model)

    return sharded


def step_of(sharded, build=Stack):
    def measure(comm, prefetch, sent):
        model = sharded(comm, build())
        set_prefetch(model, prefetch, prefetch)
        return measure_step(model, sent)

    return measure


def nothing(model):
    """No setting for this micro-batch."""


def accumulation(start, end=nothing, sharded=by_function):
    def measure(comm, prefetch, sent):
        model = sharded(comm, Stack())
        set_prefetch(model, prefetch, prefetch)
        return measure_accumulation(model, sent, start, end)

    return measure


def keep_full(model):
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)


def keep_full_and_hold_back(model):
    keep_full(model)
    model.set_requires_gradient_sync(False)


def compression(*choices, **more):
    chosen = CommunicationCompression(*choices, **more)
    return step_of(lambda comm, model: by_function(comm, model, compression=chosen))


MEASURED = {
    "modes/sharding.md": {
        name: step_of(strategy(name)) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    },
    "modes/hybrid.md": {
        "HYBRID_SHARD": step_of(hybrid("HYBRID_SHARD")),
        "_HYBRID_SHARD_ZERO2": step_of(hybrid("_HYBRID_SHARD_ZERO2")),
        "reshard_after_forward=B": step_of(lambda c, m: by_function(c, m, reshard_after_forward=2)),
    },
    "modes/mixed_precision.md": {
        "none": step_of(by_function),
        "param_dtype": step_of(policy(BF16)),
        "param_dtype, reduce_dtype": step_of(policy(BF16, FP32)),
        "param_dtype with NO_SHARD": step_of(
            lambda c, m: by_wrapper(
                c,
                m,
                sharding_strategy=ShardingStrategy.NO_SHARD,
                mixed_precision=MixedPrecision(BF16),
            )
        ),
    },
    "modes/compression.md": {
        "none": step_of(by_function),
        'gather="bf16"': compression("bf16"),
        'gather="bf16", reduce="bf16"': compression("bf16", "bf16"),
        'gather="int8" or "fp8"': compression("fp8"),
        'gather="int8", reduce="bf16"': compression("int8", "bf16"),
        'gather="int8", reduce="int8"': compression("int8", "int8"),
        "the same, error_feedback=True": compression("int8", "int8", error_feedback=True),
    },
    "modes/accumulation.md": {
        "backward again": accumulation(nothing),
        "no_sync(), set_requires_gradient_sync(False)": accumulation(
            lambda model: model.set_requires_gradient_sync(False),
            lambda model: model.set_requires_gradient_sync(True),
        ),
        "set_requires_all_reduce(False), hybrid": accumulation(
            lambda model: model.set_requires_all_reduce(False),
            lambda model: model.set_requires_all_reduce(True),
            lambda comm, model: by_function(grid(comm), model),
        ),
        "set_is_last_backward(False)": accumulation(
            lambda model: model.set_is_last_backward(False),
            lambda model: model.set_is_last_backward(True),
        ),
        "set_reshard_after_backward(False)": accumulation(
            lambda model: model.set_reshard_after_backward(False)
        ),
        "the same and set_reshard_after_forward(False)": accumulation(keep_full),
        "all three": accumulation(
            keep_full_and_hold_back, lambda model: model.set_requires_gradient_sync(True)
        ),
    },
    "modes/parameters.md": {
        "adapters in every unit": step_of(by_function, lambda: Stack(WithAdapter)),
        "frozen units first": step_of(frozen(slice(None, LAYERS // 2))),
        "frozen units last": step_of(frozen(slice(LAYERS // 2, None))),
    },
    "modes/recomputation.md": {
        "none": step_of(by_function),
        "checkpoint, not reentrant": step_of(by_function, lambda: Stack(recompute="not")),
        "checkpoint, reentrant": step_of(by_function, lambda: Stack(recompute="reentrant")),
    },
}


def cases():
    for path in ALL_PAGES:
        rows = sorted(
            {row for row, _, _ in formulas(path)} | MEASURED.get(name_of(path), {}).keys()
        )
        for row in rows:
            # Formulas of the other pages are made of those on sharding's.
            for ranks, prefetch in [(8, 1), (4, 2)] if path.stem == "sharding" else [(4, 2)]:
                name = f"{name_of(path)}-{row}-{ranks}-{prefetch}"
                yield pytest.param(path, row, ranks, prefetch, id=name)


def symbols(page, row, ranks, prefetch):
    total = LAYERS * UNIT_BYTES
    found = {"P": total, "U": UNIT_BYTES, "N": ranks, "S": 2, "B": 2, "p": prefetch}
    found |= {"c": 0.5, "r": 1.0 if "reduce_dtype" in row else 0.5}
    found |= {"F": total, "T": LAYERS * 2 * WIDTH * RANK * 4}
    if row.startswith("frozen"):
        found |= {"F": total / 2, "T": total / 2}
    return found


@pytest.mark.parametrize(("path", "row", "ranks", "prefetch"), list(cases()))
def test_formulas_are_what_the_engine_does(path, row, ranks, prefetch, sent, monkeypatch):
    """But for the turnaround, which spares the last unit's second gather (docs/symbols.md)."""
    monkeypatch.setattr(State, "_turns_around", lambda state, policy, before: False)
    page = name_of(path)
    measure = MEASURED[page][row]
    measured = LocalWorld(ranks).run(lambda comm: measure(comm, prefetch, sent))[0]
    checked = 0
    for of_row, column, formula in formulas(path):
        if of_row == row:
            promised = eval(formula, {}, symbols(page, row, ranks, prefetch))
            assert measured[column] == promised, (column, formula)
            checked += 1
    assert checked, f"{page} has no formula in a row {row!r}"
