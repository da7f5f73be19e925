# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder transformers (T5, BART and their kind) from their shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fullshard.core.errors import ConfigurationError, NotSupportedError
from fullshard.core.spec import ModelSpec, ParamSpec
from fullshard.plan.model.decoder import with_lora
from fullshard.plan.model.operations import Call, Operation
from fullshard.plan.model.shape import Norm, norm_specs
from fullshard.plan.model.work import Pricer
from fullshard.plan.run import Run, Wrap

__all__ = ["EncoderDecoder", "Pair"]


@dataclass(frozen=True)
class Pair:
    """The shape of an encoder and a decoder of one width.

    ``positions`` are rows of a learned table in each of them, ``buckets`` those of T5's relative
    positions, one table a stack. ``embedding_norm`` follows the embedding in each of them,
    ``final_norm`` their last block.
    """

    encoder_layers: int
    decoder_layers: int
    width: int
    heads: int
    head_width: int
    hidden: int
    vocab: int
    context: int
    gated: bool = False
    bias: bool = False
    tied: bool = True
    norm: Norm = Norm.RMS
    positions: int = 0
    buckets: int = 0
    embedding_norm: bool = False
    final_norm: bool = True

    def __post_init__(self) -> None:
        names = ("encoder_layers", "decoder_layers", "width", "heads", "head_width", "hidden")
        for name in (*names, "vocab", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(
                    f"a model's {name} must be a whole number of at least 1, got {value!r}"
                )


@dataclass(frozen=True)
class EncoderDecoder:
    """An encoder-decoder as a `fullshard.plan.model.model.Model`.

    A sample is as long in the decoder as in the encoder; its tokens are counted once.
    """

    name: str
    shape: Pair

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of the encoder's layers, then the decoder's."""
        shape = self.shape
        encoder = (f"encoder.block.{number}" for number in range(shape.encoder_layers))
        decoder = (f"decoder.block.{number}" for number in range(shape.decoder_layers))
        return (*encoder, *decoder)

    @property
    def parts(self) -> tuple[str, ...]:
        """Attention, cross-attention and feed-forward of each layer."""
        inside = []
        for block in self.blocks:
            cross = (f"{block}.cross",) if block.startswith("decoder") else ()
            inside += [f"{block}.attention", *cross, f"{block}.feed_forward"]
        return (*inside, *(() if self.shape.tied else ("head",)))

    @property
    def context(self) -> int:
        """Tokens of a sample, in the encoder and in the decoder."""
        return self.shape.context

    def spec(self, run: Run) -> ModelSpec:
        """All parameters as they rest."""
        return _spec(self.shape, run.param_dtype, run.lora_rank)

    def calls(self, run: Run) -> tuple[Call, ...]:
        """Embedding, encoder, embedding, decoder, head and loss."""
        if run.tensor_parallel > 1:
            raise NotSupportedError("tensor parallelism of encoder-decoders is not planned yet")
        return _calls(self.shape, run, run.sequence or self.context, run.wrap is Wrap.PART)

    def model_flops(self, run: Run) -> float:
        """6 for each parameter that multiplies a token, and attention over all its pairs."""
        shape, length = self.shape, run.sequence or self.context
        inner = shape.heads * shape.head_width
        matrices = (3 if shape.gated else 2) * shape.width * shape.hidden
        attention = 4 * shape.width * inner
        multiplied = shape.encoder_layers * (attention + matrices)
        multiplied += shape.decoder_layers * (2 * attention + matrices)
        multiplied += shape.vocab * shape.width
        scores = 12.0 * (shape.encoder_layers + 2 * shape.decoder_layers) * inner * length
        return (6.0 * multiplied + scores) * length


def _attention(shape: Pair, path: str, dtype: str) -> Iterator[ParamSpec]:
    inner = shape.heads * shape.head_width
    for name in ("query", "key", "value"):
        yield ParamSpec(f"{path}.{name}.weight", (inner, shape.width), dtype)
        if shape.bias:
            yield ParamSpec(f"{path}.{name}.bias", (inner,), dtype)
    yield ParamSpec(f"{path}.out.weight", (shape.width, inner), dtype)
    if shape.bias:
        yield ParamSpec(f"{path}.out.bias", (shape.width,), dtype)


def _feed_forward(shape: Pair, path: str, dtype: str) -> Iterator[ParamSpec]:
    for name in ("gate", "up") if shape.gated else ("up",):
        yield ParamSpec(f"{path}.{name}.weight", (shape.hidden, shape.width), dtype)
        if shape.bias:
            yield ParamSpec(f"{path}.{name}.bias", (shape.hidden,), dtype)
    yield ParamSpec(f"{path}.down.weight", (shape.width, shape.hidden), dtype)
    if shape.bias:
        yield ParamSpec(f"{path}.down.bias", (shape.width,), dtype)


def _stack(shape: Pair, name: str, layers: int, dtype: str) -> Iterator[ParamSpec]:
    if shape.positions:
        yield ParamSpec(f"{name}.positions.weight", (shape.positions, shape.width), dtype)
    if shape.embedding_norm:
        yield from norm_specs(f"{name}.embedding_norm", shape.width, shape.norm, dtype)
    kinds = ("attention", "cross") if name == "decoder" else ("attention",)
    for number in range(layers):
        path = f"{name}.block.{number}"
        for kind in kinds:
            yield from _attention(shape, f"{path}.{kind}", dtype)
            if kind == "attention" and number == 0 and shape.buckets:
                relative = f"{path}.attention.relative.weight"
                yield ParamSpec(relative, (shape.buckets, shape.heads), dtype)
            yield from norm_specs(f"{path}.{kind}_norm", shape.width, shape.norm, dtype)
        yield from _feed_forward(shape, f"{path}.feed_forward", dtype)
        yield from norm_specs(f"{path}.feed_forward_norm", shape.width, shape.norm, dtype)
    if shape.final_norm:
        yield from norm_specs(f"{name}.norm", shape.width, shape.norm, dtype)


@lru_cache(maxsize=32)
def _spec(shape: Pair, dtype: str, lora_rank: int) -> ModelSpec:
    tied = ("head.weight",) if shape.tied else ()
    params = [ParamSpec("embedding.weight", (shape.vocab, shape.width), dtype, aliases=tied)]
    for name, layers in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        stack = list(_stack(shape, name, layers, dtype))
        params += with_lora(stack, lora_rank, f"{name}.block")
    if not shape.tied:
        params.append(ParamSpec("head.weight", (shape.vocab, shape.width), dtype))
    if lora_rank:
        params = with_lora(params[:1], lora_rank, "")[:1] + params[1:]
    return ModelSpec(tuple(params))


@lru_cache(maxsize=64)
def _calls(shape: Pair, run: Run, length: int, fine: bool) -> tuple[Call, ...]:
    price = Pricer.of(run, length)
    kept = price.item * price.tokens * shape.width
    look_up = price.pointwise("embedding", shape.width, shape.width, saved=shape.width)
    calls: list[Call] = []
    for name, layers in (("encoder", shape.encoder_layers), ("decoder", shape.decoder_layers)):
        calls.append(Call("embedding", (look_up,)))
        pieces = tuple(_block(shape, price, decoder=name == "decoder"))
        whole = tuple(operation for _, operations in pieces for operation in operations)
        for number in range(layers):
            path = f"{name}.block.{number}"
            if fine:
                calls += [
                    Call(f"{path}.{part}" if part else path, operations, 0 if place else kept)
                    for place, (part, operations) in enumerate(pieces)
                ]
            else:
                calls.append(Call(path, whole, kept))
        if shape.final_norm:
            calls.append(Call(f"{name}.norm", (price.norm("norm", shape.width),)))
    head = price.head(shape.width, shape.vocab, run.loss, trained=run.lora_rank == 0)
    calls.append(Call("" if shape.tied else "head", head))
    return tuple(calls)


def _block(
    shape: Pair, price: Pricer, *, decoder: bool
) -> Iterator[tuple[str, tuple[Operation, ...]]]:
    width, inner = shape.width, shape.heads * shape.head_width
    norm = price.norm("norm", width)
    add = price.pointwise("add", 2 * width, width, saved=width, backward=(3.0 * width, 1))
    yield "", (norm,)
    for part in ("attention", "cross") if decoder else ("attention",):
        causal = decoder and part == "attention"
        projections = (
            price.matmul(name, width, inner, saved=inner) for name in ("query", "key", "value")
        )
        mixed = price.attention(shape.heads, shape.heads, shape.head_width, causal=causal)
        yield part, (*projections, mixed, price.matmul("out", inner, width))
        yield "", (add, norm)
    ups = ("gate", "up") if shape.gated else ("up",)
    matmuls = (price.matmul(name, width, shape.hidden, saved=shape.hidden) for name in ups)
    moved = len(ups) * shape.hidden
    activation = price.pointwise("activation", moved, shape.hidden, saved=moved, kernels=len(ups))
    yield "feed_forward", (*matmuls, activation, price.matmul("down", shape.hidden, width))
    yield "", (add,)
