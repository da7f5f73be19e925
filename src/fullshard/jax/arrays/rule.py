# SPDX-License-Identifier: Apache-2.0
"""How each array is cut over a mesh, decided from names and shapes alone.

[Note: One rule]
An array keeps its shape. The shard axis of the mesh cuts its largest dimension that divides; of
equal ones the first, and in an array of three dimensions or more the first dimension only if no
other divides, since that is where stacked layers lie. Matrices of layers are then cut so that
either way of computing with them is near: gathering them, or leaving them where they are and moving
activations, as column- and row-parallel products (arXiv:1909.08053) do.

Where nothing divides (3, 5, 7 devices) the dimension that needs the least padding is padded at its
end while the array rests; of those that need the same, that of stacked layers comes last, too. A
program sees the true shape: it cuts the padding off where it begins and puts it back where it ends,
which moves nothing between devices.

What a user has said goes first: patterns of a `Rule`, and axis names that a variable carries
(``nnx.with_partitioning``), which name axes of the mesh or are translated by ``Rule.logical``.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec, item_bytes
from fullshard.core.text import bytes_text
from fullshard.jax.arrays.mesh import Layout

__all__ = [
    "Axis",
    "Placement",
    "Rule",
    "coverage",
    "place",
    "refuse_idle_axes",
    "refuse_low_coverage",
    "selective",
    "threshold",
]

Axis = str | tuple[str, ...] | None
"""The cut of one dimension: by an axis of the mesh, several, or none."""


@dataclass(frozen=True)
class Rule:
    """Which arrays are sharded, and along which dimensions.

    An array is replicated if it has fewer than ``min_numel`` elements or if a pattern of
    ``replicate`` is found in its path (``re.search``); with ``only``, also if none of those is.
    ``dims`` gives the dimension that the shard axis cuts, ``tensor`` the one that ``tensor_axis``
    cuts, by pattern, the first that is found counting. ``logical`` translates the axis names that
    variables carry to axes of the mesh (None: not cut). A pattern that is found in no path is
    refused.
    """

    min_numel: int = 0
    replicate: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    tensor: Mapping[str, int] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    logical: Mapping[str, str | None] = field(default_factory=dict)
    tensor_axis: str = "tensor"

    def why_replicated(self, spec: ParamSpec) -> str:
        """The reason for which ``spec`` is replicated; empty if it is to be sharded."""
        if spec.numel < self.min_numel:
            return f"{spec.numel:,} elements, fewer than {self.min_numel:,}"
        for pattern in self.replicate:
            if re.search(pattern, spec.name):
                return f"matches {pattern!r}"
        if self.only and not any(re.search(pattern, spec.name) for pattern in self.only):
            return "matches none of " + ", ".join(map(repr, self.only))
        return ""

    def named_dim(self, table: Mapping[str, int], spec: ParamSpec) -> int | None:
        """The dimension of ``spec`` that ``table`` (``dims`` or ``tensor``) names, if any."""
        for pattern, dim in table.items():
            if re.search(pattern, spec.name):
                if not -len(spec.shape) <= dim < len(spec.shape):
                    raise ConfigurationError(
                        f"the rule's pattern {pattern!r} names dimension {dim} of {spec.name!r}, "
                        f"whose shape is {spec.shape}"
                    )
                return dim % len(spec.shape)
        return None

    def check(self, specs: Sequence[ParamSpec]) -> None:
        """Raise `ConfigurationError` for a pattern that is found in no path."""
        for pattern in (*self.replicate, *self.only, *self.tensor, *self.dims):
            if not any(re.search(pattern, spec.name) for spec in specs):
                some = ", ".join(spec.name for spec in specs[:5])
                raise ConfigurationError(
                    f"the rule's pattern {pattern!r} matches no array; paths are like {some}"
                )


DEFAULT_RULE = Rule()


def threshold(min_numel: int = 1024) -> Rule:
    """Replicate arrays of fewer than ``min_numel`` elements, shard all others."""
    return Rule(min_numel=min_numel)


def selective(size_threshold: int = 10_000_000) -> Rule:
    """Shard only arrays of at least ``size_threshold`` elements, for models with a few huge ones.

    The rule is that of `threshold`; what it is for differs, and so does the default.
    """
    return Rule(min_numel=size_threshold)


@dataclass(frozen=True)
class Placement:
    """How one array rests.

    ``axes`` says what cuts each of its dimensions. ``rest_shape`` is its shape at rest, which
    differs from ``spec.shape`` where a dimension is padded at its end. ``shards`` counts the
    different pieces; ``reason`` says why the shard axis cuts nothing, if so.
    """

    spec: ParamSpec
    axes: tuple[Axis, ...]
    rest_shape: tuple[int, ...]
    shards: int
    sharded: bool
    reason: str = ""

    @property
    def name(self) -> str:
        """The array's path."""
        return self.spec.name

    @property
    def padded(self) -> bool:
        """Whether it rests in another shape than its own."""
        return self.rest_shape != self.spec.shape

    @property
    def rest_bytes(self) -> int:
        """Bytes on one device, padding included."""
        return math.prod(self.rest_shape) * item_bytes(self.spec.dtype) // self.shards


def place(
    specs: Sequence[ParamSpec],
    layout: Layout,
    rule: Rule | None = None,
    annotations: Mapping[str, Sequence[Axis]] | None = None,
    *,
    pad: bool = True,
) -> list[Placement]:
    """How each array rests; [Note: One rule].

    ``annotations`` gives by path the axis names that a variable carries. Without ``pad`` an array
    of which no dimension divides is replicated.

    Raises:
        ConfigurationError: if a pattern of the rule matches nothing, if it or an annotation names a
            dimension that is not there or that the axis does not divide.
    """
    rule = DEFAULT_RULE if rule is None else rule
    if not isinstance(rule, Rule):
        raise ConfigurationError(f"rule={rule!r}: expected a fullshard.jax.Rule")
    rule.check(specs)
    annotated = annotations or {}
    return [_place(spec, layout, rule, annotated.get(spec.name, ()), pad) for spec in specs]


def _place(
    spec: ParamSpec, layout: Layout, rule: Rule, names: Sequence[Axis], pad: bool
) -> Placement:
    axes = _axes_given(spec, layout, rule, names)
    rest, reason = list(spec.shape), ""
    if layout.shard not in _used(axes):
        reason = rule.why_replicated(spec)
        dim = (
            None if reason else _choose(spec, layout.shards, axes, rule.named_dim(rule.dims, spec))
        )
        if dim is not None and (pad or spec.shape[dim] % layout.shards == 0):
            axes[dim] = layout.shard
            rest[dim] = -(-spec.shape[dim] // layout.shards) * layout.shards
        elif not reason:
            reason = (
                "a scalar" if not spec.shape
                else "has no elements" if not spec.numel
                else f"{layout.shards} divides no dimension of {spec.shape}"
            )  # fmt: skip
    shards = math.prod(layout.sizes[axis] for axis in _used(axes))
    sharded = layout.shard in _used(axes)
    return Placement(spec, tuple(axes), tuple(rest), shards, sharded, reason)


def _axes_given(spec: ParamSpec, layout: Layout, rule: Rule, names: Sequence[Axis]) -> list[Axis]:
    """What the user has said of each dimension, checked."""
    axes: list[Axis] = [None] * len(spec.shape)
    for dim, name in enumerate(names):
        each = tuple(_translated(part, layout, rule) for part in _parts(name))
        known = tuple(part for part in each if part is not None)
        axes[dim] = known[0] if len(known) == 1 else known or None
    tensor = rule.named_dim(rule.tensor, spec)
    if tensor is not None:
        if rule.tensor_axis not in layout.sizes:
            raise ConfigurationError(
                f"the rule cuts {spec.name!r} along {rule.tensor_axis!r}, which is no axis of the "
                f"mesh: it has {', '.join(layout.sizes)}; name one by Rule(tensor_axis=)"
            )
        axes[tensor] = rule.tensor_axis
    for dim, axis in enumerate(axes):
        size = math.prod(layout.sizes[part] for part in _parts(axis))
        if spec.shape[dim] % size:
            raise ConfigurationError(
                f"{'x'.join(_parts(axis))}={size} does not divide dimension {dim} of "
                f"{spec.name!r}, whose shape is {spec.shape}: change the rule or the mesh"
            )
    return axes


def _translated(name: str, layout: Layout, rule: Rule) -> str | None:
    found = rule.logical.get(name, name if name in layout.sizes else None)
    if found is not None and found not in layout.sizes:
        raise ConfigurationError(
            f"the rule translates {name!r} to {found!r}, which is no axis of the mesh: it has "
            f"{', '.join(layout.sizes)}"
        )
    return found


def _choose(spec: ParamSpec, shards: int, axes: Sequence[Axis], asked: int | None) -> int | None:
    """The dimension to cut, to be padded if it does not divide; None if there is none."""
    shape = spec.shape
    free = [dim for dim, axis in enumerate(axes) if axis is None]
    if not free or not spec.numel:
        return None
    if asked is not None and asked in free:
        return asked

    def merit(dim: int) -> tuple[bool, bool, float, bool, int]:
        divides = shape[dim] % shards == 0
        stacked = dim == 0 and len(shape) >= 3
        waste = -(-shape[dim] // shards) * shards / shape[dim]
        size = shape[dim] if divides else -waste
        return divides, not (divides and stacked), size, not stacked, -dim

    return max(free, key=merit)


def _parts(axis: Axis) -> tuple[str, ...]:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else axis


def _used(axes: Iterable[Axis]) -> set[str]:
    return {part for axis in axes for part in _parts(axis)}


def coverage(placements: Iterable[Placement], held: Collection[str] = ()) -> float:
    """The share of all bytes that the shard axis cuts, from 0 to 1; 1 if there are none.

    Arrays whose names are in ``held`` do not count: they are whole while a step runs.
    """
    total = sharded = 0
    for each in placements:
        total += each.spec.bytes
        sharded += each.spec.bytes if each.sharded and each.name not in held else 0
    return sharded / total if total else 1.0


def refuse_idle_axes(placements: Sequence[Placement], layout: Layout) -> None:
    """Raise `ConfigurationError` for an axis along which all devices would do the same."""
    used = {*layout.batch, *(axis for each in placements for axis in _used(each.axes))}
    for axis, size in layout.sizes.items():
        if size > 1 and axis not in used and any(each.sharded for each in placements):
            raise ConfigurationError(
                f"the mesh has {axis}={size}, but no rule says what to cut along it: give "
                f"batch_axes= with {axis!r} in it, or rule=Rule(tensor={{pattern: dimension}}, "
                f"tensor_axis={axis!r})"
            )


def refuse_low_coverage(
    placements: Sequence[Placement],
    at_most_unsharded: float,
    held: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise `ConfigurationError` if more than that share of the bytes is not sharded.

    ``held`` are arrays that are whole from the beginning of a step to its end, with the reason.
    """
    missing = 1 - coverage(placements, held)
    if missing <= at_most_unsharded:
        return
    kept = [each for each in placements if not each.sharded or each.name in held]
    kept.sort(key=lambda each: -each.spec.numel)
    lines = [
        f"  {each.name} {each.spec.shape}, {bytes_text(each.spec.bytes)}: "
        f"{each.reason or 'gathered from beginning to end: ' + held[each.name]}"
        for each in kept[:5]
    ]
    raise ConfigurationError(
        f"{missing:.1%} of all bytes would be on every device, more than "
        f"{at_most_unsharded:.0%}; the largest:\n"
        + "\n".join(lines)
        + "\n"
        + (
            "cut another dimension by Rule(dims={pattern: dimension})"
            if held
            else "make_train_step pads and shards any shape"
        )
        + "; or allow it with at_most_unsharded=1.0"
    )
