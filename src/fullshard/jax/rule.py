# SPDX-License-Identifier: Apache-2.0
"""The rule that cuts each array over a mesh, from names and shapes alone.

[Note: One rule]
An array keeps its shape. The shard axis of the mesh cuts its largest dimension that divides; of
equal ones the first, and in an array of three dimensions or more the first only if no other
divides, since that is where stacked layers lie. Where nothing divides the array is whole on every
device: nothing is padded, so a state is what users, files and the other engine expect.

What a user has said goes first: patterns of a `Rule`, and axis names that a variable carries
(``nnx.with_partitioning``), which name axes of the mesh or are translated by ``Rule.logical``.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec
from fullshard.core.text import bytes_text
from fullshard.jax.mesh import Axis, MeshAxes, axis_names

LARGE_BYTES = 1 << 20
"""Bytes from which an array on every device, or gathered where XLA likes, is told of."""


@dataclass(frozen=True)
class Rule:
    """A choice of the arrays that are sharded, and of their dimensions.

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


def threshold(min_numel: int = 1024) -> Rule:
    """Replicate arrays of fewer than ``min_numel`` elements, shard all others."""
    return Rule(min_numel=min_numel)


def selective(size_threshold: int = 10_000_000) -> Rule:
    """Shard only arrays of at least ``size_threshold`` elements: of models with a few huge ones."""
    return Rule(min_numel=size_threshold)


@dataclass(frozen=True)
class Placement:
    """One array's cut: ``axes`` by dimension, into ``shards`` different pieces.

    ``reason`` says why the shard axis cuts nothing, if so.
    """

    spec: ParamSpec
    axes: tuple[Axis, ...]
    shards: int
    reason: str = ""

    @property
    def name(self) -> str:
        """The array's path."""
        return self.spec.name

    @property
    def sharded(self) -> bool:
        """True if the shard axis cuts it."""
        return not self.reason

    @property
    def rest_bytes(self) -> int:
        """Bytes on one device."""
        return self.spec.bytes // self.shards


def place(
    specs: Sequence[ParamSpec],
    mesh: MeshAxes,
    rule: Rule | None = None,
    annotations: Mapping[str, Sequence[Axis]] | None = None,
) -> list[Placement]:
    """Decide where each array rests; [Note: One rule].

    ``annotations`` gives by path the axis names that a variable carries. Raises
    `ConfigurationError` if a pattern of the rule matches nothing, if it or an annotation names a
    dimension that is not there or that the axis does not divide.
    """
    rule = Rule() if rule is None else rule
    if not isinstance(rule, Rule):
        raise ConfigurationError(f"rule={rule!r}: expected a fullshard.jax.Rule")
    for pattern in (*rule.replicate, *rule.only, *rule.tensor, *rule.dims):
        if not any(re.search(pattern, spec.name) for spec in specs):
            some = ", ".join(spec.name for spec in specs[:5])
            raise ConfigurationError(
                f"the rule's pattern {pattern!r} matches no array; paths are like {some}"
            )
    return [_place(spec, mesh, rule, (annotations or {}).get(spec.name, ())) for spec in specs]


def _place(spec: ParamSpec, mesh: MeshAxes, rule: Rule, names: Sequence[Axis]) -> Placement:
    axes = _axes_asked(spec, mesh, rule, names)
    reason = ""
    if mesh.shard not in _used(axes):
        # Where it divides; in front, where stacked layers lie, only if nowhere else.
        dims = [dim for dim, size in enumerate(spec.shape)
                if axes[dim] is None and spec.numel and size % mesh.shards == 0]  # fmt: skip
        reason = _why_whole(spec, rule)
        if not reason and dims:
            stack = 0 if len(spec.shape) >= 3 else None
            axes[max(dims, key=lambda dim: (dim != stack, spec.shape[dim], -dim))] = mesh.shard
        elif not reason:
            no_dim = f"{mesh.shards} divides no dimension of {spec.shape}"
            reason = no_dim if spec.shape else "a scalar"
    return Placement(spec, tuple(axes), mesh.count(tuple(_used(axes))), reason)


def _why_whole(spec: ParamSpec, rule: Rule) -> str:
    if spec.numel < rule.min_numel:
        return f"{spec.numel:,} elements, fewer than {rule.min_numel:,}"
    for pattern in rule.replicate:
        if re.search(pattern, spec.name):
            return f"matches {pattern!r}"
    if rule.only and not any(re.search(pattern, spec.name) for pattern in rule.only):
        return "matches none of " + ", ".join(map(repr, rule.only))
    return ""


def _axes_asked(spec: ParamSpec, mesh: MeshAxes, rule: Rule, names: Sequence[Axis]) -> list[Axis]:
    """The cuts that the user has asked for, checked."""
    axes: list[Axis] = [None] * len(spec.shape)
    there = mesh.mesh.shape

    def refuse_unknown(axis: str, what: str) -> None:
        if axis not in there:
            raise ConfigurationError(
                f"the rule {what} {axis!r}, which is no axis of the mesh: name one of "
                f"{', '.join(there)}"
            )

    for dim, name in enumerate(names):
        known: list[str] = []
        for part in axis_names(name):
            axis = rule.logical.get(part, part if part in there else None)
            if axis is not None:
                refuse_unknown(axis, f"translates {part!r} to")
                known.append(axis)
        axes[dim] = known[0] if len(known) == 1 else tuple(known) or None
    tensor, asked = _dim_named(rule.tensor, spec), _dim_named(rule.dims, spec)
    if tensor is not None:
        refuse_unknown(rule.tensor_axis, f"cuts {spec.name!r} along")
        axes[tensor] = rule.tensor_axis
    if asked is not None and axes[asked] is None and mesh.shard not in _used(axes):
        axes[asked] = mesh.shard
    for dim, cut in enumerate(axes):
        if spec.shape[dim] % mesh.count(cut):
            raise ConfigurationError(
                f"{'x'.join(axis_names(cut))}={mesh.count(cut)} does not divide dimension "
                f"{dim} of {spec.name!r}, whose shape is {spec.shape}: change the rule or the mesh"
            )
    return axes


def _dim_named(table: Mapping[str, int], spec: ParamSpec) -> int | None:
    for pattern, dim in table.items():
        if re.search(pattern, spec.name):
            if not -len(spec.shape) <= dim < len(spec.shape):
                raise ConfigurationError(
                    f"the rule's pattern {pattern!r} names dimension {dim} of {spec.name!r}, "
                    f"whose shape is {spec.shape}"
                )
            return dim % len(spec.shape)
    return None


def _used(axes: Iterable[Axis]) -> set[str]:
    return {part for axis in axes for part in axis_names(axis)}


def coverage(placements: Sequence[Placement]) -> float:
    """The share of all bytes that the shard axis cuts, from 0 to 1; 1 if there are none."""
    total = sum(each.spec.bytes for each in placements)
    return sum(each.spec.bytes for each in placements if each.sharded) / total if total else 1.0


def refuse_idle_axes(placements: Sequence[Placement], mesh: MeshAxes) -> None:
    """Raise `ConfigurationError` for an axis along which all devices would do the same."""
    used = {*mesh.batch, *(axis for each in placements for axis in _used(each.axes))}
    for axis, size in mesh.mesh.shape.items() if any(x.sharded for x in placements) else ():
        if size > 1 and axis not in used:
            raise ConfigurationError(
                f"the mesh has {axis}={size}, but no rule says what to cut along it: give "
                f"batch_axes= with {axis!r} in it, or rule=Rule(tensor={{pattern: dimension}}, "
                f"tensor_axis={axis!r})"
            )


def refuse_low_coverage(
    placements: Sequence[Placement], at_most_unsharded: float, at_most_bytes: int = 0
) -> None:
    """Raise `ConfigurationError` if more than that share, and more bytes, are not sharded."""
    whole = sorted((each for each in placements if not each.sharded), key=lambda x: -x.spec.numel)
    missing = 1 - coverage(placements)
    if missing <= at_most_unsharded or sum(x.spec.bytes for x in whole) <= at_most_bytes:
        return
    lines = [f"  {x.name} {x.spec.shape}, {bytes_text(x.spec.bytes)}: {x.reason}" for x in whole]
    raise ConfigurationError(
        f"{missing:.1%} of all bytes would be on every device, more than {at_most_unsharded:.0%}; "
        "the largest:\n" + "\n".join(lines[:5]) + "\ntake a number of devices that divides "
        "a dimension, or allow it with at_most_unsharded=1.0"
    )
