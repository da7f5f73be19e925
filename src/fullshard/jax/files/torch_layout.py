# SPDX-License-Identifier: Apache-2.0
"""Names under which a state is, array for array, what the torch engine stores."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fullshard.jax.arrays.leaves import key_text
from fullshard.jax.files.leaves import StoredAs

__all__ = ["torch_layout"]


def torch_layout(
    state: Any,
    torch_names: Mapping[str, Any],
    groups: Callable[[str, tuple[int, ...]], int] = lambda name, shape: 0,
) -> tuple[dict[str, StoredAs], dict[str, Any]]:
    """``names`` and ``about`` with which ``state`` is what the torch engine stores, and reads.

    ``torch_names`` maps paths of parameters to what `fullshard.jax.torch_names` gives (name, axes,
    tied). A leaf whose path ends with such a path is that parameter; behind ``mu`` or ``nu`` (of
    optax's Adam) it is its first or second moment, which torch calls exp_avg and exp_avg_sq; a
    ``count`` beside them is torch's ``step`` of every parameter. All other leaves are optional when
    loading, and integers among them that count steps become the checkpoint's step. ``groups`` says
    in which group of the torch optimizer a parameter is, by name and shape there.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    names: dict[str, StoredAs] = {}
    counts: list[str] = []
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        texts = [key_text(key) for key in path]
        full = ".".join(texts)
        place = next((k for k in range(len(texts)) if ".".join(texts[k:]) in torch_names), None)
        if place is not None:
            there = torch_names[".".join(texts[place:])]
            kind = {"mu": "exp_avg", "nu": "exp_avg_sq"}.get(texts[place - 1] if place else "")
            name = f"model/{there.name}"
            if kind is None:
                aliases = tuple(f"model/{each}" for each in there.tied)
                names[full] = StoredAs(name, there.axes, aliases=aliases)
                shapes[name] = tuple(value.shape[axis] for axis in there.axes)
            else:
                names[full] = StoredAs(f"optimizer/{kind}/{name}", there.axes)
        elif texts[-1] == "count":
            counts.append(full)
        else:
            is_step = texts[-1] == "step"
            names[full] = StoredAs(f"jax/{full}", optional=True, is_step=is_step)
    steps = [f"optimizer/step/{name}" for name in shapes]
    for full in counts:
        names[full] = StoredAs(steps[0], also=tuple(steps[1:]), dtype="float32")
    numbers = sorted({groups(name, shape) for name, shape in shapes.items()})
    listed = [
        {"params": [name for name, shape in shapes.items() if groups(name, shape) == number]}
        for number in numbers
    ]
    optimizer = {"class": "AdamW", "groups": listed, "values": {}}
    parts = {"model": "weights", "optimizer": "optimizer"}
    about = {"parts": parts, "optimizers": {"optimizer": optimizer}, "values": {}}
    return names, about
