# SPDX-License-Identifier: Apache-2.0
"""Shapes of transformers, as configurations state them, and the names that their modules have."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import resources
from typing import Any

from fullshard.core.errors import ConfigurationError, check_whole
from fullshard.core.presets import Transformer
from fullshard.core.spec import ParamSpec

_MOST_LAYERS = 4096  # each is told by itself; the deepest in use have a few hundred


class Norm(Enum):
    """The normalisation before attention and feed-forward."""

    RMS = "rms"  # a weight, by which it multiplies in the dtype of activations
    WIDE_RMS = "wide rms"  # the same, but in float32
    LAYER = "layer"  # a weight and a bias


class HeadNorm(Enum):
    """The normalisation of queries and keys."""

    NONE = "none"
    HEAD = "head"  # of each head, with a weight that all share
    WHOLE = "whole"  # of all heads together
    BARE = "bare"  # of each head, without a weight


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the feed-forward.

    ``count`` experts of inner width ``hidden``, of which each token uses ``active``; ``shared`` is
    the inner width of the expert that all tokens use. The first ``dense_blocks`` blocks have a
    plain feed-forward. Of those that are dealt out over devices, ``of`` is how many there are.
    A number for each token scales what ``gated_shared`` ones give. With ``bias`` router and
    experts have biases. A ``wide_router`` multiplies in float32.
    """

    count: int
    active: int
    hidden: int
    shared: int = 0
    dense_blocks: int = 0
    of: int = 0
    gated_shared: bool = False
    bias: bool = False
    wide_router: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "active", "hidden"):
            check_whole(f"experts' {name}", getattr(self, name))
        if self.active > self.routed:
            raise ConfigurationError(f"a token cannot go to {self.active} of {self.routed} experts")

    @property
    def routed(self) -> int:
        """The number of experts among which a router chooses."""
        return self.of or self.count


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values come from ``kv_rank`` features a token (arXiv:2405.04434).

    Queries come from ``query_rank`` features, if that is not 0. Of a head ``turned`` features have
    positions, which all heads share in keys, and ``value`` is how many its values have.
    """

    query_rank: int
    kv_rank: int
    turned: int
    value: int


@dataclass(frozen=True)
class Naming:
    """The names of modules and parameters; those inside a block are below its path."""

    blocks: str = "blocks"
    embedding: str = "embedding"
    positions: str = "positions"
    final_norm: str = "norm"
    head: str = "output"
    attention: str = "attention"
    query: str = "query"
    key: str = "key"
    value: str = "value"
    joint: str = ""  # one matrix for query, key and value
    out: str = "out"
    attention_norm: str = "attention_norm"
    feed_forward: str = "feed_forward"
    gate: str = "gate"
    up: str = "up"
    down: str = "down"
    feed_forward_norm: str = "feed_forward_norm"
    after_attention: str = ""  # norms of what attention and feed-forward give
    after_feed_forward: str = ""
    norms_first: bool = True


def _namings() -> dict[str, Naming]:
    file = resources.files("fullshard.plan.model").joinpath("namings.toml")
    found: dict[str, Naming] = {}
    for name, told in tomllib.loads(file.read_text("utf-8")).items():
        base = found[told.pop("like")] if "like" in told else Naming()
        found[name] = replace(base, **told)
    return found


NAMINGS = _namings()
"""The names of each family, such as LLAMA's."""


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Widths are in features, ``context`` in tokens. With ``gated`` the feed-forward has three
    matrices, else two. ``learned_positions`` have a table of ``context`` rows. ``window`` is how
    far attention looks back (0: all the way); each ``whole_every``-th block looks all the way. With
    ``sinks`` each head has one score more. ``bias`` is of all matrices, ``qkv_bias`` of queries,
    keys and values, ``out_bias`` of attention's last. With ``dropout`` scores and what attention
    and feed-forward give lose some elements: a byte of each says which. ``gelu_parts`` is how many
    features of inner width an activation of single kernels keeps beside its input and output.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    vocab: int
    context: int
    gated: bool = True
    tied: bool = False
    bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    norm: Norm = Norm.RMS
    query_key_norm: HeadNorm = HeadNorm.NONE
    learned_positions: bool = False
    rotary: bool = True
    window: int = 0
    whole_every: int = 0
    sinks: bool = False
    dropout: bool = False
    gelu_parts: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    naming: Naming = field(default_factory=Naming)

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab"):
            check_whole(f"a model's {name}", getattr(self, name))
        for name in ("window", "whole_every"):
            check_whole(f"a model's {name}", getattr(self, name), 0)
        if self.layers > _MOST_LAYERS:
            raise ConfigurationError(
                f"{self.layers} layers: of more than {_MOST_LAYERS} no plan is made"
            )
        if self.heads % self.kv_heads:
            raise ConfigurationError(
                f"{self.heads} heads cannot share {self.kv_heads} key and value heads evenly"
            )

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Shape":
        """A shape from plain data: enumerations by their values, namings by their names."""
        read = {name: _READ[name](fields[name]) for name in _READ if name in fields}
        return cls(**{**fields, **read})

    def cut(self, degree: int) -> "Shape":
        """Cut heads and hidden width for one of ``degree`` devices under tensor parallelism.

        Norms and what is looked up stay whole here; a vocabulary is cut beside the hidden width.
        """
        if degree == 1:
            return self
        uneven = [
            f"{name} {value}"
            for name in ("heads", "kv_heads", "hidden")
            if (value := getattr(self, name)) % degree
        ]
        if uneven:
            raise ConfigurationError(
                f"tensor parallelism over {degree} devices cannot cut {', '.join(uneven)} evenly"
            )
        experts = self.experts
        if experts is not None:
            experts = replace(
                experts, hidden=experts.hidden // degree, shared=experts.shared // degree
            )
        return replace(
            self,
            heads=self.heads // degree,
            kv_heads=self.kv_heads // degree,
            hidden=self.hidden // degree,
            vocab=-(-self.vocab // degree),
            experts=experts,
        )

    def dealt_out(self, degree: int) -> "Shape":
        """Leave the experts of one of ``degree`` devices, and all of the rest."""
        if degree == 1:
            return self
        count = self.experts.count if self.experts else 0
        if self.experts is None or count % degree:
            raise ConfigurationError(
                f"{count or 'no'} experts cannot be dealt out evenly over {degree} devices"
            )
        return replace(self, experts=replace(self.experts, count=count // degree, of=count))

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Features of all key heads; of all value heads."""
        return self.kv_heads * self.head_width

    @property
    def out_width(self) -> int:
        """Features that attention gives to its last product."""
        return self.heads * (self.latent.value if self.latent else self.head_width)

    @property
    def latent_matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the products before attention, as transformers names them."""
        latent = self.latent
        if latent is None:
            return {}
        rank, kept, width = latent.query_rank, latent.kv_rank, self.width
        query = {"q_proj": (self.query_width, width)}
        if rank:
            query = {"q_a_proj": (rank, width), "q_b_proj": (self.query_width, rank)}
        both = self.heads * (self.head_width - latent.turned + latent.value)
        down = {"kv_a_proj_with_mqa": (kept + latent.turned, width)}
        return {**query, **down, "kv_b_proj": (both, kept)}

    def window_in(self, block: int) -> int:
        """The tokens that attention of one block looks back, 0 for all."""
        every = self.whole_every
        return 0 if every and (block + 1) % every == 0 else self.window

    def experts_in(self, block: int) -> Experts | None:
        """The experts of one block, None if its feed-forward is plain."""
        experts = self.experts
        return experts if experts is not None and block >= experts.dense_blocks else None


_READ: dict[str, Callable[[Any], Any]] = {
    "naming": NAMINGS.__getitem__,
    "norm": Norm,
    "query_key_norm": HeadNorm,
    "experts": lambda told: Experts(**told),
    "latent": lambda told: Latent(**told),
}


def shape_of(preset: Transformer) -> Shape:
    """The shape of one of the presets that training and planning share."""
    same = ("layers", "width", "heads", "kv_heads", "head_width", "hidden", "vocab", "context")
    return Shape(**{name: getattr(preset, name) for name in (*same, "tied")})


def _matrix(path: str, out: int, into: int, dtype: str, bias: bool) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{path}.weight", (out, into), dtype)
    if bias:
        yield ParamSpec(f"{path}.bias", (out,), dtype)


def norm_specs(path: str, width: int, norm: Norm, dtype: str) -> Iterator[ParamSpec]:
    """The parameters of one normalisation."""
    yield ParamSpec(f"{path}.weight", (width,), dtype)
    if norm is Norm.LAYER:
        yield ParamSpec(f"{path}.bias", (width,), dtype)


def block_specs(shape: Shape, block: int, dtype: str) -> Iterator[ParamSpec]:
    """The parameters of block number ``block``, in registration order."""
    names = shape.naming
    path = f"{names.blocks}.{block}"
    first, second, *after = (
        tuple(norm_specs(f"{path}.{name}", shape.width, shape.norm, dtype))
        for name in (
            names.attention_norm,
            names.feed_forward_norm,
            names.after_attention,
            names.after_feed_forward,
        )
        if name
    )
    attention = _attention_specs(shape, f"{path}.{names.attention}", dtype)
    feed_forward = _feed_forward_specs(shape, block, f"{path}.{names.feed_forward}", dtype)
    if names.norms_first:
        yield from (*first, *attention, *second, *feed_forward)
    else:
        yield from (
            *attention,
            *feed_forward,
            *first,
            *second,
            *(each for s in after for each in s),
        )


def _attention_specs(shape: Shape, path: str, dtype: str) -> Iterator[ParamSpec]:
    names, bias = shape.naming, shape.bias or shape.qkv_bias
    query, kv = shape.query_width, shape.kv_width
    if shape.latent:
        for name, (out, into) in shape.latent_matrices.items():
            if "_b_" in name:
                yield ParamSpec(f"{path}.{name[:-7]}_a_layernorm.weight", (into,), dtype)
            yield from _matrix(f"{path}.{name}", out, into, dtype, bias)
    elif names.joint:
        yield from _matrix(f"{path}.{names.joint}", query + 2 * kv, shape.width, dtype, bias)
    else:
        yield from _matrix(f"{path}.{names.query}", query, shape.width, dtype, bias)
        yield from _matrix(f"{path}.{names.key}", kv, shape.width, dtype, bias)
        yield from _matrix(f"{path}.{names.value}", kv, shape.width, dtype, bias)
    out_bias = shape.bias or shape.out_bias
    yield from _matrix(f"{path}.{names.out}", shape.width, shape.out_width, dtype, out_bias)
    if shape.query_key_norm in (HeadNorm.HEAD, HeadNorm.WHOLE):
        whole = shape.query_key_norm is HeadNorm.WHOLE
        yield ParamSpec(f"{path}.q_norm.weight", (query if whole else shape.head_width,), dtype)
        yield ParamSpec(f"{path}.k_norm.weight", (kv if whole else shape.head_width,), dtype)
    if shape.sinks:
        yield ParamSpec(f"{path}.sinks", (shape.heads,), dtype)


def _feed_forward_specs(shape: Shape, block: int, path: str, dtype: str) -> Iterator[ParamSpec]:
    experts = shape.experts_in(block)
    if experts is None:
        yield from _dense_specs(shape, path, shape.hidden, dtype)
        return
    yield from _matrix(f"{path}.router", experts.routed, shape.width, dtype, experts.bias)
    # Stacked over experts, as libraries lay them out for grouped products.
    ups = 2 if shape.gated else 1
    for name, into, out in (
        ("gate_up_proj", shape.width, ups * experts.hidden),
        ("down_proj", experts.hidden, shape.width),
    ):
        yield ParamSpec(f"{path}.experts.{name}", (experts.count, into, out), dtype)
        if experts.bias:
            yield ParamSpec(f"{path}.experts.{name}_bias", (experts.count, out), dtype)
    if experts.shared:
        yield from _dense_specs(shape, f"{path}.shared_expert", experts.shared, dtype)
        if experts.gated_shared:
            yield ParamSpec(f"{path}.shared_expert_gate.weight", (1, shape.width), dtype)


def _dense_specs(shape: Shape, path: str, hidden: int, dtype: str) -> Iterator[ParamSpec]:
    names = shape.naming
    if shape.gated:
        yield from _matrix(f"{path}.{names.gate}", hidden, shape.width, dtype, shape.bias)
    yield from _matrix(f"{path}.{names.up}", hidden, shape.width, dtype, shape.bias)
    yield from _matrix(f"{path}.{names.down}", shape.width, hidden, dtype, shape.bias)
