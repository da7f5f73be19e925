# SPDX-License-Identifier: Apache-2.0
"""Pictures of units, layouts, strategies and checkpoints."""

from canvas import Picture, picture


@picture
def idea() -> Picture:
    p = Picture(
        760,
        240,
        "Four ranks hold a quarter of every layer; a layer is whole only while it computes",
    )
    for rank in range(4):
        x = 20 + rank * 185
        p.text(x + 80, 22, f"rank {rank}", "title", "middle")
        for layer in range(4):
            y = 40 + layer * 50
            whole = layer == 1
            if whole:
                p.box(x, y, 160, 36, "full", "layer 1, whole")
            else:
                p.box(x, y, 160, 36, "plain")
                p.box(x + rank * 40, y, 40, 36, "shard")
    p.note(
        "Each rank keeps a quarter of every layer. Layer 1 computes now, so all ranks have "
        "gathered it; layer 2 is being gathered behind its back, and layer 1 is dropped when it "
        "is done."
    )
    return p


@picture
def unit_states() -> Picture:
    p = Picture(
        760,
        270,
        "The states of a unit: RESTING, FULL, FULL_WITH_GRADS, GRADS, and the ops between them",
    )
    p.box(30, 40, 170, 60, "shard", "RESTING", "the shard alone")
    p.box(300, 40, 160, 60, "full", "FULL", "+ full parameters")
    p.box(560, 40, 180, 60, "full", "FULL_WITH_GRADS", "+ full gradients")
    p.box(560, 200, 180, 60, "grad", "GRADS", "full gradients alone")
    p.arrow((200, 60), (300, 60), text="gather")
    p.arrow((300, 85), (200, 85), text="free", above=-16)
    p.arrow((460, 60), (560, 60), text="fill")
    p.arrow((650, 100), (650, 200), text="free")
    p.arrow((560, 230), (115, 230), (115, 100), text="reduce: the shard's gradient is there")
    p.arrow((620, 200), (620, 100), dash=True)
    p.text(612, 155, "gather: next micro-batch", "small", "end")
    return p


@picture
def layouts() -> Picture:
    p = Picture(760, 275, "The same unit by element and by row over four ranks")
    p.text(20, 24, 'align="element": one segment, equal slices, padded at its end', "title")
    shades = ("shard", "full", "grad", "good")
    for rank in range(4):
        p.box(20 + rank * 180, 70, 180, 40, shades[rank], f"rank {rank}")
    for start, width, name in (
        (20, 330, "weight"),
        (350, 60, "bias"),
        (410, 290, "weight 2"),
        (700, 40, "pad"),
    ):
        p.box(start, 36, width, 28, "plain", name)
    p.text(
        20,
        132,
        "One message a unit; slices cut through parameters, so a rank holds flat spans.",
        "small",
    )
    p.text(20, 180, 'align="row": a segment for each large parameter, cut between rows', "title")
    for start, width, name in (
        (20, 320, "weight, 8 rows"),
        (360, 280, "weight 2, 4 rows"),
        (660, 80, "packed"),
    ):
        p.box(start, 192, width, 28, "plain", name)
        for rank in range(4):
            p.box(start + rank * width / 4, 226, width / 4, 40, shades[rank], str(rank))
    p.note(
        "Every slice is whole rows: a true Shard(0) DTensor. Small parameters travel packed; "
        "rows that do not divide are padded, and a unit travels as several messages of one "
        "call."
    )
    return p


@picture
def parameter_and_gradient() -> Picture:
    p = Picture(
        760, 355, "The way of a parameter into forward and of a gradient back into its shard"
    )
    p.text(20, 24, "a parameter", "title")
    p.box(20, 40, 150, 56, "shard", "shard at rest", "unit/shards")
    p.box(230, 40, 150, 56, "full", "full buffer", "unit/full_parameters")
    p.box(440, 40, 140, 56, "plain", "forward", "your module")
    p.box(620, 40, 120, 56, "plain", "saved views", "autograd")
    p.arrow((170, 68), (230, 68), text="gather")
    p.arrow((380, 68), (440, 68), text="views")
    p.arrow((580, 68), (620, 68))
    p.arrow((305, 96), (305, 130), (95, 130), (95, 96))
    p.text(110, 150, "free: the storage shrinks to nothing, its object stays", "small")
    p.text(20, 200, "a gradient", "title")
    p.box(620, 216, 120, 56, "plain", "backward", "autograd")
    p.box(430, 216, 150, 56, "grad", "full gradients", "unit/full_gradients")
    p.box(230, 216, 150, 56, "grad", "this rank's slice", "unit/gradients")
    p.box(20, 216, 150, 56, "shard", "param.grad", "shard at rest")
    p.arrow((620, 244), (580, 244), text="arrives")
    p.arrow((430, 244), (380, 244), text="reduce")
    p.arrow((230, 244), (170, 244), text="divide")
    p.arrow((95, 272), (95, 320), (230, 320), dash=True)
    p.box(230, 300, 150, 44, "good", "optimizer.step()", "")
    p.note(
        "core/schedule decides when: step/ turns hooks into its events, step/executor carries "
        "its ops out."
    )
    return p


@picture
def checkpoint_commit() -> Picture:
    p = Picture(760, 205, "A checkpoint is written into a staging folder and shown by one rename")
    for rank in range(3):
        p.box(20, 30 + rank * 56, 110, 40, "shard", f"rank {rank}")
        p.arrow((130, 50 + rank * 56), (220, 50 + rank * 56), text="write" if rank == 0 else "")
    p.box(220, 20, 190, 172, "plain", "")
    p.text(315, 42, "staging folder", "title", "middle")
    for rank in range(3):
        p.box(245, 54 + rank * 34, 140, 26, "shard", f"rank-{rank}")
    p.box(245, 158, 140, 26, "good", "manifest")
    p.arrow((410, 106), (560, 106), text="all flushed: one rename")
    p.box(560, 20, 180, 172, "good", "")
    p.text(650, 110, "step-000000001000", "title", "middle")
    p.note(
        "A crash before the rename leaves a staging folder that nobody reads; after it, the "
        "step is complete."
    )
    return p


@picture
def reshard() -> Picture:
    p = Picture(
        760,
        190,
        "Slices that four ranks wrote are read by three: each reads the boxes that it needs",
    )
    shades = ("shard", "full", "grad", "good")
    p.text(20, 24, "written by 4 ranks", "title")
    for rank in range(4):
        p.box(20 + rank * 180, 36, 180, 44, shades[rank], f"rank {rank}")
    p.note(
        "Cuts differ, so rank 1 reads the end of one file and the beginning of another; each "
        "4 MiB chunk has a checksum."
    )
    p.text(20, 122, "read by 3", "title")
    for rank in range(3):
        p.box(20 + rank * 240, 134, 240, 44, "plain", f"rank {rank}")
        p.arrow((140 + rank * 240, 82), (140 + rank * 240, 132))
    return p


@picture
def hybrid() -> Picture:
    p = Picture(760, 220, "Hybrid sharding: shards inside a group, replicas across groups")
    shades = ("shard", "full", "grad", "good")
    for group in range(2):
        y = 40 + group * 110
        p.text(20, y + 34, f"host {group}", "title")
        for rank in range(4):
            p.box(
                120 + rank * 150,
                y,
                130,
                56,
                shades[rank],
                f"rank {group * 4 + rank}",
                f"quarter {rank}",
            )
    for rank in range(4):
        x = 185 + rank * 150
        p.arrow((x, 96), (x, 150), text="all-reduce" if rank == 3 else "")
        p.arrow((x, 150), (x, 96))
    p.note(
        "Gathers and reduces stay inside a host; only a quarter of the gradients crosses "
        "between hosts."
    )
    return p


@picture
def at_rest() -> Picture:
    p = Picture(760, 250, "What a rank of eight holds at rest with AdamW, by strategy")
    rows = (
        ("NO_SHARD, DDP", (120, 120, 240)),
        ("SHARD_GRAD_OP", (15, 15, 30)),
        ("FULL_SHARD", (15, 15, 30)),
    )
    for number, (name, widths) in enumerate(rows):
        y, x = 40 + number * 50, 170
        p.text(20, y + 22, name)
        for width, kind in zip(widths, ("full", "grad", "shard"), strict=True):
            p.box(x, y, width, 32, kind)
            x += width
        if name == "SHARD_GRAD_OP":
            p.box(x + 6, y, 120, 32, "full dash", "")
            p.text(x + 134, y + 21, "full parameters from forward to the end of backward", "small")
        if name == "FULL_SHARD":
            p.box(x + 6, y, 20, 32, "full dash", "")
            p.text(x + 34, y + 21, "two units at a time", "small")
    for number, (kind, name) in enumerate(
        (("full", "parameters"), ("grad", "gradients"), ("shard", "both moments"))
    ):
        p.box(170 + number * 150, 206, 22, 18, kind)
        p.text(200 + number * 150, 220, name, "small")
    return p


@picture
def direct_exchange() -> Picture:
    p = Picture(760, 175, "On Gloo, ranks send slices to each other directly")
    p.text(20, 24, "reduce by all-reduce (Gloo's own)", "title")
    p.text(400, 24, "direct exchange (fullshard's)", "title")
    for side, x in enumerate((20, 400)):
        for rank in range(3):
            p.box(x + rank * 115, 60, 90, 40, "grad", f"rank {rank}")
        if side == 0:
            p.arrow((x + 90, 72), (x + 115, 72))
            p.arrow((x + 205, 72), (x + 230, 72))
            p.arrow((x + 275, 100), (x + 275, 126), (x + 45, 126), (x + 45, 100))
            p.text(x, 156, "2(N-1)/N of the buffer a rank, twice around a ring", "small")
        else:
            p.arrow((x + 90, 72), (x + 115, 72))
            p.arrow((x + 115, 88), (x + 90, 88))
            p.arrow((x + 205, 72), (x + 230, 72))
            p.arrow((x + 230, 88), (x + 205, 88))
            p.arrow((x + 275, 100), (x + 275, 126), (x + 45, 126), (x + 45, 100))
            p.text(x, 156, "(N-1)/N of the buffer; sums in fp32, in rank order", "small")
    return p


@picture
def ties() -> Picture:
    p = Picture(760, 195, "A weight that two units use belongs to the deepest unit around both")
    p.box(260, 20, 240, 56, "full", "root", "owns the tied weight")
    p.box(60, 130, 200, 56, "plain", "embedding", "shows it")
    p.box(290, 130, 180, 56, "plain", "layers", "units of their own")
    p.box(500, 130, 200, 56, "plain", "head", "shows it")
    p.arrow((330, 76), (160, 130))
    p.arrow((380, 76), (380, 130), dash=True)
    p.arrow((430, 76), (600, 130))
    p.note("Gathered once, its gradient is the sum of both uses, reduced once.")
    return p
