# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of the documentation as SVG that follows light and dark.

    python docs/pictures/draw.py        write them beside this file

Each function below draws one, from boxes, arrows and texts; `tests/test_pictures.py` holds that the
files are what this script writes. Those with figures are drawn from what fullshard computes.
"""

import itertools
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
text.small { font-size: 12px; fill: #57606a }
text.title { font-weight: 600 }
.line { stroke: #57606a; stroke-width: 1.5; fill: none }
.tip { fill: #57606a }
.dash { stroke-dasharray: 5 4 }
.plain { fill: #f6f8fa; stroke: #8c959f }
.shard { fill: #b6d7ff; stroke: #1f6feb }
.full { fill: #ffd8a8; stroke: #bc4c00 }
.grad { fill: #d8c7ff; stroke: #6639ba }
.good { fill: #b7ebc0; stroke: #1a7f37 }
.away { fill: #ffc9c9; stroke: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  text.small { fill: #9da7b3 }
  .line { stroke: #9da7b3 }
  .tip { fill: #9da7b3 }
  .plain { fill: #21262d; stroke: #6e7681 }
  .shard { fill: #12407a; stroke: #58a6ff }
  .full { fill: #6b3a10; stroke: #f0883e }
  .grad { fill: #43307a; stroke: #b392f0 }
  .good { fill: #14532d; stroke: #3fb950 }
  .away { fill: #6e1f24; stroke: #ff7b72 }
}
"""

PICTURES: dict[str, Callable[[], "Picture"]] = {}


class Picture:
    """An SVG that grows element by element; lengths are pixels, y points down."""

    def __init__(self, width: int, height: int, told: str) -> None:
        """Start a picture; ``told`` is what somebody hears who cannot see it."""
        self.size = (width, height)
        self.told = told
        self.parts: list[str] = []

    def note(self, text) -> None:
        """Put a caption below everything, in as many lines as it takes."""
        width, height = self.size
        for line in textwrap.wrap(text, width // 7):
            self.text(20, height + 10, line, "small")
            height += 18
        self.size = (width, height + 4)

    def box(self, x, y, width, height, kind="plain", text="", below="") -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>'
        )
        middle = y + height / 2 + (5 if not below else -3)
        if text:
            self.text(x + width / 2, middle, text, anchor="middle")
        if below:
            self.text(x + width / 2, middle + 17, below, "small", anchor="middle")

    def text(self, x, y, text, kind="", anchor="start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points, text="", dash=False, above=8) -> None:
        """Draw a line through ``points`` with a tip at its end, and a text over its longest leg."""
        path = " L".join(f"{x} {y}" for x, y in points)
        kind = "line dash" if dash else "line"
        self.parts.append(f'<path class="{kind}" marker-end="url(#tip)" d="M{path}"/>')
        if text:
            legs = list(itertools.pairwise(points))
            (x0, y0), (x1, y1) = max(
                legs, key=lambda leg: abs(leg[0][0] - leg[1][0]) + abs(leg[0][1] - leg[1][1])
            )
            upright = x0 == x1
            place = (
                (x0 + x1) / 2 + (8 if upright else 0),
                (y0 + y1) / 2 - (0 if upright else above),
            )
            self.text(*place, text, "small", "start" if upright else "middle")

    def svg(self) -> str:
        width, height = self.size
        tip = (
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path class="tip" d="M0 0 L10 5 L0 10z"/>'
            "</marker></defs>"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img"><title>{escape(self.told)}</title>'
        )
        return "\n".join([head, f"<style>{STYLE}</style>", tip, *self.parts, "</svg>", ""])


def picture(draw: Callable[[], Picture]) -> Callable[[], Picture]:
    PICTURES[draw.__name__.replace("_", "-")] = draw
    return draw


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


@picture
def communicators() -> Picture:
    p = Picture(
        760,
        175,
        "Gathers and reduces go through communicators of their own and overlap on the wire",
    )
    for number, name in enumerate(("gathers", "compute", "reduces")):
        p.text(20, 50 + number * 52, name, "title")
    for k in range(4):
        p.box(110 + k * 125, 30, 110, 32, "shard", f"unit {3 - k}")
        p.box(225 + k * 125, 82, 120, 32, "full", f"backward {3 - k}")
        p.box(
            350 + k * 125 if k < 3 else 725,
            134,
            110 if k < 3 else 30,
            32,
            "grad",
            f"unit {3 - k}" if k < 3 else "",
        )
    p.note(
        "While unit 2 computes, unit 1 is on its way here and the gradients of unit 3 are on "
        "their way out."
    )
    return p


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
