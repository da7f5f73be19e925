# SPDX-License-Identifier: Apache-2.0
"""Pictures of tasks: precision, accumulation, adapters, failures and what else a page shows."""

from canvas import Picture, picture


def lane(p: Picture, y: float, name: str, *boxes: tuple[float, float, str, str]) -> None:
    """Draw a titled row of boxes: each has its left edge, width, kind and text."""
    p.text(20, y + 26, name, "title")
    for x, width, kind, text in boxes:
        p.box(x, y, width, 40, kind, text)


def chain(p: Picture, y: float, *boxes: tuple[int, str, str, str]) -> None:
    """Draw boxes from left to right with arrows between: width, kind, text and line below."""
    x = 20
    for number, (width, kind, text, below) in enumerate(boxes):
        if number:
            p.arrow((x, y + 28), (x + 32, y + 28))
            x += 32
        p.box(x, y, width, 56, kind, text, below)
        x += width


@picture
def mixed_precision() -> Picture:
    p = Picture(760, 204, "The dtypes on the way of a parameter and of its gradient")
    p.text(20, 24, "a parameter", "title")
    chain(
        p,
        36,
        (140, "shard", "float32", "shard at rest"),
        (150, "plain", "bfloat16", "cast, then gathered"),
        (150, "full", "bfloat16", "forward, backward"),
    )
    p.text(20, 122, "its gradient", "title")
    chain(
        p,
        134,
        (140, "full", "bfloat16", "as autograd made it"),
        (150, "grad", "float32", "cast, then reduced"),
        (150, "shard", "float32", "gradient at rest"),
        (150, "good", "float32", "optimizer.step()"),
    )
    p.note("param_dtype=bfloat16 halves what gathers send; reduce_dtype=float32 keeps sums exact.")
    return p


@picture
def accumulation() -> Picture:
    p = Picture(760, 210, "Two ways to accumulate three micro-batches")
    for number, (name, quiet) in enumerate((("backward again", False), ("no_sync()", True))):
        y = 30 + number * 90
        p.text(20, y + 24, name, "title")
        for batch in range(3):
            x = 165 + batch * 195
            p.box(x, y, 120, 36, "full", f"micro-batch {batch}")
            if quiet and batch < 2:
                p.text(x + 124, y + 23, "keep", "small")
            else:
                p.box(x + 122, y, 62, 36, "grad", "reduce")
        held = "whole gradients between micro-batches" if quiet else "a slice of the gradients"
        p.text(165, y + 56, f"held: {held}", "small")
    p.note("The sums are the same. no_sync sends a third less and holds all gradients whole.")
    return p


@picture
def offload() -> Picture:
    p = Picture(760, 215, "What lies on the host and what on the device with offload")
    p.text(20, 48, "device", "title")
    p.text(20, 168, "host", "title")
    p.box(110, 20, 150, 48, "full", "whole block", "while it computes")
    p.box(420, 20, 150, 48, "grad", "gradient slice", "after the reduce")
    p.box(110, 140, 150, 48, "shard", "parameter slices", "pinned memory")
    p.box(420, 140, 150, 48, "shard", "gradients, moments", "")
    p.box(610, 140, 130, 48, "good", "optimizer.step()", "")
    p.arrow((185, 140), (185, 68), text="copy, then gather")
    p.arrow((495, 68), (495, 140), text="copy")
    p.arrow((570, 164), (610, 164))
    p.arrow((260, 44), (420, 44), text="backward, reduce")
    p.note(
        "offload_params: every gather begins with a copy. offload_optimizer: a working copy of the "
        "slices stays on the device, and is refreshed once a step."
    )
    return p


@picture
def adapters() -> Picture:
    p = Picture(760, 175, "A unit with a frozen base and trained adapters")
    p.text(20, 24, "one block's unit on four ranks", "title")
    for rank in range(4):
        x = 20 + rank * 183
        p.box(x, 40, 130, 44, "plain", "frozen base")
        p.box(x + 132, 40, 40, 44, "good", "A B")
        p.text(x, 104, f"rank {rank}: a quarter of both", "small")
    p.arrow((20, 136), (740, 136), text="gathered together, for forward and for backward")
    p.note(
        "Only A and B have gradients, optimizer state and a reduce. A 4-bit base travels as the "
        "bytes in which it rests."
    )
    return p


@picture
def tensor_parallel() -> Picture:
    p = Picture(760, 240, "Two ranks cut a matrix by tensor parallelism, each part is sharded")
    p.text(250, 24, "tensor axis", "small", "middle")
    shades = ("shard", "full", "grad", "good")
    for row in range(2):
        p.text(20, 78 + row * 96, f"data {row}", "title")
        for column in range(2):
            place = row * 2 + column
            x, y = 100 + column * 170, 40 + row * 96
            p.box(x, y, 150, 76, shades[place], f"rank {place}", f"half {row} of part {column}")
    p.arrow((450, 80), (500, 80))
    p.text(510, 76, "forward sees part 0 and part 1 as a", "small")
    p.text(510, 94, "DTensor on the tensor axis", "small")
    p.arrow((450, 176), (500, 176))
    p.text(510, 172, "gathers and reduces run down a", "small")
    p.text(510, 190, "column: the data axis", "small")
    p.note("Parallelise first, then shard over the other axis of the mesh.")
    return p


@picture
def experts() -> Picture:
    p = Picture(760, 265, "Who sends what to whom with experts on an axis of their own")
    shades = ("shard", "full", "grad", "good")
    for rank in range(4):
        x = 20 + rank * 185
        p.text(x + 80, 24, f"rank {rank}", "title", "middle")
        p.box(x, 36, 160, 36, "plain", "attention, a quarter")
        experts = "0-3" if rank % 2 == 0 else "4-7"
        p.box(x, 80, 160, 36, shades[rank % 2], f"half of experts {experts}")
    for left in (70, 440):  # there and back
        p.arrow((left, 116), (left, 148), (left + 205, 148), (left + 205, 116))
        p.arrow((left + 235, 116), (left + 235, 160), (left - 30, 160), (left - 30, 116))
        p.text(left + 102, 142, "rows, and results", "small", "middle")
    p.arrow((55, 116), (55, 196), (425, 196), (425, 116), text="experts 0-3: over ranks 0 and 2")
    p.arrow((20, 226), (740, 226), text="attention: gathered and reduced over all four")
    p.note("A pair has all experts: its rows travel within, by the model's own code.")
    return p


@picture
def parted() -> Picture:
    p = Picture(760, 220, "Rank 1 leaves out block 2; the others learn it within two seconds")
    rows = (
        ("rank 0", ("A", "B", "C", "waits")),
        ("rank 1", ("A", "B", "D", "waits")),
        ("rank 2", ("A", "B", "C", "waits")),
    )
    for number, (name, calls) in enumerate(rows):
        boxes = []
        for place, call in enumerate(calls):
            odd = call == "D"
            kind = "away" if odd else "plain" if call == "waits" else "shard"
            text = call if call == "waits" else f"gather {call}"
            boxes.append((100 + place * 130, 120, kind, text))
        lane(p, 20 + number * 54, name, *boxes)
    p.arrow((620, 94), (665, 94))
    p.text(670, 80, "all raise:", "small")
    p.text(670, 97, "rank 1 has", "small")
    p.text(670, 114, "left out C", "small")
    p.note(
        "A rank that stands in one call compares its last calls with those of four others. Where "
        "two have numbered different calls alike, waiting does not help."
    )
    return p


@picture
def resume() -> Picture:
    p = Picture(760, 200, "A run is killed on two ranks and goes on with three")
    lane(
        p,
        24,
        "2 ranks",
        *((110 + k * 85, 80, "shard", f"{k * 10 + 1}-{k * 10 + 10}") for k in range(2)),
        (280, 45, "away", "kill"),
    )
    p.box(110, 84, 165, 36, "good", "steps 10 and 20")
    lane(
        p,
        140,
        "3 ranks",
        *((280 + k * 85, 80, "shard", f"{k * 10 + 21}-{k * 10 + 30}") for k in range(4)),
    )
    p.arrow((275, 102), (320, 102), (320, 140))
    p.text(340, 106, "each rank reads its part of step 20", "small")
    p.note(
        "Samples are a function of the step, so three ranks see what two would have seen. Steps "
        "21 to 25 were lost and are run again."
    )
    return p


@picture
def background_save() -> Picture:
    p = Picture(760, 165, "An asynchronous save: training stops for the copy alone")
    lane(
        p,
        20,
        "training",
        (120, 150, "full", "step 100"),
        (272, 60, "shard", "copy"),
        (334, 150, "full", "step 101"),
        (486, 150, "full", "step 102"),
    )
    lane(
        p,
        84,
        "thread",
        (334, 230, "shard", "write, flush"),
        (566, 90, "good", "rename"),
    )
    p.note("The copy goes to host memory; a further save waits for the one before.")
    return p


@picture
def verified_load() -> Picture:
    p = Picture(760, 110, "A load verifies everything on all ranks before the model changes")
    chain(
        p,
        24,
        (120, "plain", "manifest", "which boxes"),
        (140, "shard", "read", "this rank's boxes"),
        (140, "plain", "verify", "chunk by chunk"),
        (120, "plain", "agree", "all ranks"),
        (70, "good", "deliver", ""),
    )
    p.note("Damage names file, tensor and bytes, and leaves the model as it was.")
    return p


@picture
def planner() -> Picture:
    p = Picture(760, 200, "The planner replays the engine's schedule for a model and a cluster")
    p.box(20, 20, 150, 50, "plain", "model", "preset, config, module")
    p.box(20, 80, 150, 50, "plain", "cluster", "devices and links")
    p.box(20, 140, 150, 50, "plain", "run", "batch, precision, ...")
    p.box(240, 70, 180, 70, "shard", "one list of a step", "computation and ops")
    p.box(490, 30, 120, 50, "full", "memory", "its peak")
    p.box(490, 120, 120, 50, "full", "time", "each stream")
    p.box(650, 70, 95, 70, "good", "ranked", "and why")
    for y in (45, 105, 165):
        p.arrow((170, y), (240, 105))
    p.arrow((420, 105), (490, 55))
    p.arrow((420, 105), (490, 145))
    p.arrow((610, 55), (650, 95))
    p.arrow((610, 145), (650, 115))
    p.note("Repeated for every strategy, wrapping, micro-batch and recomputation that is open.")
    return p


@picture
def proof() -> Picture:
    p = Picture(760, 250, "What is tried where: from plain Python to other people's code")
    rows = (
        (
            "plain Python",
            "layouts, schedules, checkpoint geometry",
            "thousands of random cases",
            480,
        ),
        ("ranks as threads", "the engine waits for what it must", "collectives end late", 535),
        ("simulated device", "streams do not race", "faults are planted", 590),
        ("processes", "losses of one process", "every mode, beside DDP and FSDP2", 645),
        ("others' code", "scripts and libraries", "PyTorch, Hugging Face, Fabric", 700),
    )
    for number, (name, claim, how, width) in enumerate(rows):
        y = 16 + number * 44
        p.box(20, y, width, 38, ("good", "shard", "full", "grad", "plain")[number])
        p.text(34, y + 24, name, "title")
        p.text(190, y + 17, claim, "small")
        p.text(190, y + 32, how, "small")
    p.note("Narrow is quick and broad is slow: most tests are in the rows above.")
    return p


@picture
def two_stages() -> Picture:
    p = Picture(760, 205, "With several ranks a host, a slice crosses the link between hosts once")
    for host in range(2):
        x = 60 + host * 360
        p.box(x - 30, 20, 320, 150, "plain")
        p.text(x - 18, 42, f"host {host}", "title")
        for rank in range(2):
            p.box(x + rank * 160, 56, 110, 40, "shard", f"rank {host * 2 + rank}")
    p.arrow((115, 96), (115, 150), (475, 150), (475, 96), text="1: equal numbers exchange slices")
    p.arrow((170, 76), (220, 76), text="2")
    p.arrow((530, 76), (580, 76), text="2")
    p.note("2: then the ranks of a host pass on what they received.")
    return p


@picture
def recomputation() -> Picture:
    p = Picture(760, 150, "A block is gathered once for its recomputation and its backward")
    lane(
        p,
        20,
        "gathers",
        (110, 80, "shard", "C"),
        (350, 80, "shard", "C"),
    )
    lane(
        p,
        76,
        "compute",
        (192, 80, "full", "C"),
        (274, 70, "away", "D'"),
        (432, 80, "full", "C again"),
        (514, 150, "away", "C'"),
    )
    p.note("Traffic and the bytes of units are what they are without recomputation.")
    return p


@picture
def first_values() -> Picture:
    p = Picture(760, 140, "A large model begins on the meta device, and gets memory when it is cut")
    chain(
        p,
        24,
        (150, "plain", "meta device", "shapes, no memory"),
        (150, "shard", "fully_shard", "slices of shapes"),
        (150, "shard", "to_empty", "memory for slices"),
        (165, "good", "values", "drawn or loaded"),
    )
    p.note(
        "New memory is NaN, so a parameter without a value is named before it trains. Draws are "
        "those of one process."
    )
    return p
