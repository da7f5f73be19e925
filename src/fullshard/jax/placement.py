# SPDX-License-Identifier: Apache-2.0
"""How each array rests on the mesh, decided from names and shapes alone.

[Note: Two forms at rest]
An array whose dimension 0 the shards divide rests as it is, cut along that dimension: ``ROWS``. Any
other rests ``FLAT``: as one line of elements, padded with zeros to a multiple of the shards. So any
number of devices works, nothing has to be replicated, and the padding of an array is less than one
element for each shard; rows padded to a multiple would be up to N - 1 whole rows, of which an array
(4, 1024) on 8 devices is an example, being doubled. In both forms the slice of a shard is
contiguous, a gather puts slices one behind the other, and what it gives *is* the array in row-major
order: the cut of the padding and the reshape after it move nothing. It is dimension 0 and never
another, since slices of a later dimension have to be taken apart and put together around each
collective (a reduce-scatter of dimension 1 took twenty times one of dimension 0).

Blocks of equal structure rest stacked, ``(layers, ...)``, and are cut along the dimension behind.
A scan over layers needs them so, and stacking them in every step would cost a copy of all of them.
"""

import enum
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ParamSpec, item_bytes
from fullshard.core.text import bytes_text

__all__ = [
    "DEFAULT_RULE",
    "Form",
    "Placement",
    "Rule",
    "ShardingRule",
    "coverage",
    "place",
    "place_dims",
    "refuse_low_coverage",
    "selective",
    "threshold",
]


class Form(enum.Enum):
    """How an array rests: see [Note: Two forms at rest]."""

    ROWS = "rows"
    FLAT = "flat"
    DIMS = "dims"  # in its own shape, cut along the dimensions that ``axes`` name
    REPLICATED = "replicated"


@dataclass(frozen=True)
class Rule:
    """Which arrays are sharded, and which along a second dimension.

    An array is replicated if it has fewer than ``min_numel`` elements or if a pattern of
    ``replicate`` is found in its path (``re.search``); with ``only``, also if none of those is.
    ``tensor`` gives the dimension to cut along the tensor axis, by pattern, the first that is found
    counting. A pattern that is found in no path is refused.
    """

    min_numel: int = 0
    replicate: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    tensor: Mapping[str, int] = field(default_factory=dict)

    def why_replicated(self, spec: ParamSpec) -> str | None:
        """The reason for which ``spec`` is replicated; None if it is to be sharded."""
        if spec.numel < self.min_numel:
            return f"{spec.numel:,} elements, fewer than {self.min_numel:,}"
        for pattern in self.replicate:
            if re.search(pattern, spec.name):
                return f"matches {pattern!r}"
        if self.only and not any(re.search(pattern, spec.name) for pattern in self.only):
            return "matches none of " + ", ".join(map(repr, self.only))
        return None

    def tensor_dim(self, spec: ParamSpec) -> int | None:
        """The dimension of ``spec`` that is cut along the tensor axis, if any."""
        for pattern, dim in self.tensor.items():
            if re.search(pattern, spec.name):
                if not -len(spec.shape) <= dim < len(spec.shape):
                    raise ConfigurationError(
                        f"tensor rule {pattern!r} names dimension {dim} of {spec.name!r}, whose "
                        f"shape is {spec.shape}"
                    )
                return dim % len(spec.shape)
        return None

    def check(self, specs: Sequence[ParamSpec]) -> None:
        """Raise `ConfigurationError` for a pattern that is found in no path."""
        for pattern in (*self.replicate, *self.only, *self.tensor):
            if not any(re.search(pattern, spec.name) for spec in specs):
                some = ", ".join(spec.name for spec in specs[:5])
                raise ConfigurationError(
                    f"the rule's pattern {pattern!r} matches no array; paths are like {some}"
                )


ShardingRule = Rule | None

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
    """How one array rests, or several of equal shape, stacked.

    ``rest_shape`` is the shape at rest, of all shards together, with the stack's dimension and the
    padding; ``axes`` names the mesh axis, or None, along which each of its dimensions is cut.
    """

    members: tuple[ParamSpec, ...]
    stacked: bool
    form: Form
    rest_shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    shards: int
    reason: str = ""

    @property
    def name(self) -> str:
        """The path; of a stack, with the first and the last number where its members' differ."""
        if not self.stacked:
            return self.members[0].name
        parts = zip(*(spec.name.split(".") for spec in self.members), strict=True)
        return ".".join(
            each[0] if len(set(each)) == 1 else f"{each[0]}-{each[-1]}" for each in parts
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The true shape of one member."""
        return self.members[0].shape

    @property
    def dtype(self) -> str:
        """The dtype at rest."""
        return self.members[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether the optimizer updates it."""
        return self.members[0].trainable

    @property
    def numel(self) -> int:
        """Elements without padding, of all members."""
        return sum(spec.numel for spec in self.members)

    @property
    def rest_bytes(self) -> int:
        """Bytes on one device, padding included."""
        return math.prod(self.rest_shape) * item_bytes(self.dtype) // self.shards

    @property
    def padding_numel(self) -> int:
        """Elements at rest, on all shards together, that belong to no array."""
        return math.prod(self.rest_shape) - self.numel


def place(
    groups: Iterable[tuple[ParamSpec, ...] | list[ParamSpec]],
    sizes: Mapping[str, int],
    rule: ShardingRule = None,
) -> list[Placement]:
    """How each group rests on a mesh whose axes have these sizes; [Note: Two forms at rest].

    A group is one array, or as a list the arrays of equal shape and dtype of a stack of blocks, in
    order of layers. What a rule cuts along the tensor axis rests in its own shape, as `place_dims`
    says, if that axis has more than one device.

    Raises:
        ConfigurationError: if a pattern of the rule matches nothing, or the tensor axis does not
            divide the dimension that it names.
    """
    groups = list(groups)
    rule = rule or DEFAULT_RULE
    rule.check([spec for group in groups for spec in group])
    return [_place_group(tuple(group), isinstance(group, list), sizes, rule) for group in groups]


def _place_group(
    members: tuple[ParamSpec, ...], stacked: bool, sizes: Mapping[str, int], rule: Rule
) -> Placement:
    spec = members[0]
    shards = sizes.get("fsdp", 1)
    front = (len(members),) if stacked else ()
    none: tuple[None, ...] = (None,) * len(front)
    if sizes.get("tensor", 1) > 1 and rule.tensor_dim(spec) is not None:
        alone = _place_in_shape(spec, sizes, rule)
        rest, axes = (*front, *spec.shape), (*none, *alone.axes)
        return Placement(members, stacked, alone.form, rest, axes, alone.shards, alone.reason)
    why = next(filter(None, map(rule.why_replicated, members)), None)
    if why is None and spec.numel == 0:
        why = "has no elements"
    if why is not None:
        rest = (*front, *spec.shape)
        return Placement(members, stacked, Form.REPLICATED, rest, (None,) * len(rest), 1, why)
    if spec.shape and spec.shape[0] % shards == 0:
        rest = (*front, *spec.shape)
        axes = (*none, "fsdp", *(None,) * (len(spec.shape) - 1))
        return Placement(members, stacked, Form.ROWS, rest, axes, shards)
    rest = (*front, -(-spec.numel // shards) * shards)
    return Placement(members, stacked, Form.FLAT, rest, (*none, "fsdp"), shards)


def place_dims(
    specs: Sequence[ParamSpec], sizes: Mapping[str, int], rule: ShardingRule = None
) -> list[Placement]:
    """How each array rests in its own shape, as ``jit`` with a `NamedSharding` wants it.

    The fsdp axis takes the first dimension that it divides (and the tensor axis has not taken);
    an array that has none is replicated over it. ``sizes`` are those of the mesh axes.

    Raises:
        ConfigurationError: if the tensor axis does not divide the dimension that a rule names.
    """
    rule = rule or DEFAULT_RULE
    rule.check(specs)
    return [_place_in_shape(spec, sizes, rule) for spec in specs]


def _place_in_shape(spec: ParamSpec, sizes: Mapping[str, int], rule: Rule) -> Placement:
    axes: list[str | None] = [None] * len(spec.shape)
    shards = 1
    tensor_dim = rule.tensor_dim(spec)
    if tensor_dim is not None:
        tensor = sizes.get("tensor", 1)
        if spec.shape[tensor_dim] % tensor:
            raise ConfigurationError(
                f"tensor={tensor} does not divide dimension {tensor_dim} of {spec.name!r}, whose "
                f"shape is {spec.shape}: change the rule or the mesh"
            )
        axes[tensor_dim] = "tensor"
        shards *= tensor
    fsdp = sizes.get("fsdp", 1)
    reason = rule.why_replicated(spec)
    if reason is None:
        free = [dim for dim, axis in enumerate(axes) if axis is None and spec.shape[dim] > 0]
        dim = next((dim for dim in free if spec.shape[dim] % fsdp == 0), None)
        if dim is None:
            reason = f"{fsdp} divides no dimension of {spec.shape}"
        else:
            axes[dim] = "fsdp"
            shards *= fsdp
    form = Form.DIMS if any(axes) else Form.REPLICATED
    return Placement((spec,), False, form, spec.shape, tuple(axes), shards, reason or "")


def coverage(placements: Iterable[Placement]) -> float:
    """The share of all bytes that is cut along the fsdp axis, from 0 to 1; 1 if there are none."""
    total = sharded = 0
    for each in placements:
        size = each.numel * item_bytes(each.dtype)
        total += size
        sharded += size if "fsdp" in each.axes else 0
    return sharded / total if total else 1.0


def refuse_low_coverage(placements: Sequence[Placement], at_most_unsharded: float) -> None:
    """Raise `ConfigurationError` if more than that share of the bytes is not sharded."""
    missing = 1 - coverage(placements)
    if missing <= at_most_unsharded:
        return
    kept = [each for each in placements if "fsdp" not in each.axes]
    kept.sort(key=lambda each: -each.numel)
    lines = [
        f"  {each.name} {each.shape}, {bytes_text(each.rest_bytes)}: {each.reason}"
        for each in kept[:5]
    ]
    raise ConfigurationError(
        f"{missing:.1%} of all bytes would be on every device, more than "
        f"{at_most_unsharded:.0%}; the largest:\n" + "\n".join(lines) + "\n"
        "make_train_step pads and shards any shape; or allow it with at_most_unsharded=1.0"
    )
