# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformers, dense or with experts, from their shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from fullshard.core.spec import ModelSpec, ParamSpec
from fullshard.plan.model.adapters import adapters, with_adapters
from fullshard.plan.model.operations import Kind, ModelCall, Operation, Workload
from fullshard.plan.model.shape import (
    Experts,
    HeadNorm,
    Norm,
    Shape,
    block_specs,
    norm_specs,
)
from fullshard.plan.model.work import Pricer
from fullshard.plan.run import ONE_BY_ONE, Adapted, ExpertKernel, Run, Wrap

# Of what memory reaches: 196,608 rows of 2,048 in bfloat16 on a B200 take 1.85 ms through PyTorch's
# indexing_backward_kernel (pytorch/ao pull request 4623), which is 0.87 TB/s of 7.7.
_ADDED_SHARE = 0.15


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer as a `fullshard.plan.model.operations.Model`.

    ``classes`` are the names of the classes of a block, its attention and its feed-forward.
    """

    name: str
    shape: Shape
    classes: tuple[str, str, str] = ("Block", "Attention", "FeedForward")

    @property
    def blocks(self) -> tuple[str, ...]:
        """Paths of its layers."""
        return tuple(f"{self.shape.naming.blocks}.{n}" for n in range(self.shape.layers))

    @property
    def parts(self) -> tuple[str, ...]:
        """Embedding, attention and feed-forward of each layer, head."""
        names = self.shape.naming
        inside = [
            f"{block}.{part}"
            for block in self.blocks
            for part in (names.attention, names.feed_forward)
        ]
        head = () if self.shape.tied else (names.head,)
        return (names.embedding, *inside, *head)

    @property
    def experts(self) -> tuple[str, ...]:
        """The stacked experts of each block that has any."""
        inside = f"{self.shape.naming.feed_forward}.experts"
        blocks = enumerate(self.blocks)
        return tuple(f"{block}.{inside}" for n, block in blocks if self.shape.experts_in(n))

    @property
    def context(self) -> int:
        """Tokens of a sample."""
        return self.shape.context

    def spec(self, run: Run) -> ModelSpec:
        """All parameters as they rest, LoRA's behind those of the block they adapt.

        Under tensor parallelism they are the part of one device, and so are experts dealt out.
        """
        shape = self.shape.cut(run.tensor_parallel).dealt_out(run.expert_parallel)
        rows = _table_rows(self.shape, run), _positions(shape, run)
        spec = _spec(shape, run.param_dtype, *rows)
        return (
            ModelSpec(tuple(with_adapters(spec.params, run, shape.naming)))
            if run.lora_rank
            else spec
        )

    def calls(self, run: Run) -> tuple[ModelCall, ...]:
        """Embedding, layers, head and loss."""
        return _calls(self.shape, run, run.sequence or self.context, run.wrap is Wrap.PART)

    def model_flops(self, run: Run) -> float:
        """FLOPs of one sample as MFU counts them (PaLM, arXiv:2204.02311, appendix B).

        6 for each parameter that multiplies a token, and 12 * layers * query width * length for
        attention without discount for the causal mask.
        """
        shape, length = self.shape, run.sequence or self.context
        multiplied = _multiplied(shape)
        per_token = 6.0 * multiplied + 12.0 * shape.layers * shape.query_width * length
        return per_token * length


def _table_rows(shape: Shape, run: Run) -> int:
    """Rows of the embedding on one device; a tied one is cut as the head is."""
    cut = run.cut_embedding or shape.tied
    return -(-shape.vocab // run.tensor_parallel) if cut else shape.vocab


def _positions(shape: Shape, run: Run) -> int:
    return max(shape.context, run.sequence) if shape.learned_positions else 0


@lru_cache(maxsize=64)
def _spec(shape: Shape, dtype: str, rows: int, positions: int) -> ModelSpec:
    names = shape.naming
    head = f"{names.head}.weight"
    tied = (head,) if shape.tied else ()
    params = [ParamSpec(f"{names.embedding}.weight", (rows, shape.width), dtype, aliases=tied)]
    if positions:
        params.append(ParamSpec(f"{names.positions}.weight", (positions, shape.width), dtype))
    for block in range(shape.layers):
        params += block_specs(shape, block, dtype)
    params += norm_specs(names.final_norm, shape.width, shape.norm, dtype)
    if not shape.tied:
        params.append(ParamSpec(head, (shape.vocab, shape.width), dtype))
    return ModelSpec(tuple(params))


def _multiplied(shape: Shape) -> int:
    """Parameters that multiply a token: of experts those in use, no looked-up embedding."""
    attention = shape.width * (shape.query_width + 2 * shape.kv_width)
    if shape.latent:
        attention = sum(out * into for out, into in shape.latent_matrices.values())
    attention += shape.width * shape.out_width
    matrices = 3 if shape.gated else 2
    total = shape.layers * (attention + 2 * shape.width) + shape.vocab * shape.width
    for block in range(shape.layers):
        experts = shape.experts_in(block)
        hidden = shape.hidden
        if experts is not None:
            hidden = experts.active * experts.hidden + experts.shared
            total += experts.count * shape.width
        total += matrices * shape.width * hidden
    return total


@lru_cache(maxsize=256)
def _calls(shape: Shape, run: Run, length: int, fine: bool) -> tuple[ModelCall, ...]:
    rows = _table_rows(shape, run)
    shape = shape.cut(run.tensor_parallel).dealt_out(run.expert_parallel)
    price = replace(
        Pricer.of(run, length),
        layer_norms=shape.norm is Norm.LAYER,
        wide_norms=shape.norm is Norm.WIDE_RMS,
    )
    names = shape.naming
    kinds: dict[tuple[Experts | None, int], tuple[tuple[str, tuple[Operation, ...]], ...]] = {}
    # Between the parts that are cut by heads and hidden width, tokens are: sequence parallelism.
    # They have the dtype of the parameters, also where autocast computes in another.
    wide = run.full_item
    apart = replace(price, tokens=price.tokens // run.tensor_parallel, item=wide)
    calls = [ModelCall(names.embedding, (_look_up(rows, shape.width, apart),))]
    kept = wide * apart.tokens * shape.width
    cache = 2 * price.item * price.tokens * shape.kv_width if run.use_cache else 0
    for block in range(shape.layers):
        path = f"{names.blocks}.{block}"
        experts = shape.experts_in(block)
        kind = experts, shape.window_in(block)
        if kind not in kinds:
            seen = replace(shape, window=kind[1], whole_every=0)
            kinds[kind] = tuple(_block(seen, experts, price, apart, run))
        pieces = kinds[kind]
        if experts is not None and run.expert_parallel > 1 and not fine:
            before, own, after = pieces[:-3], pieces[-3], pieces[-2:]
            calls.append(ModelCall(path, _joined(before), kept, cache))
            calls.append(ModelCall(f"{path}.{own[0]}", own[1]))
            calls.append(ModelCall(f"{path}.{after[0][0]}", _joined(after)))
        elif fine:
            calls += [
                ModelCall(f"{path}.{part}" if part else path, operations)
                if number
                else ModelCall(path, operations, kept, cache)
                for number, (part, operations) in enumerate(pieces)
            ]
        else:
            calls.append(ModelCall(path, _joined(pieces), kept, cache))
    degree = run.tensor_parallel
    head = price.head(shape.width, shape.vocab, run.loss, trained=run.lora_rank == 0, degree=degree)
    norm = apart.norm("norm", shape.width, gathered=degree)
    calls.append(ModelCall(names.final_norm, (norm,)))
    if shape.tied:  # its weight is the embedding's, which a unit around both owns
        calls.append(ModelCall("", head))
    else:
        calls.append(ModelCall(names.head, head))
    return tuple(calls)


@lru_cache(maxsize=256)
def _joined(pieces: tuple[tuple[str, tuple[Operation, ...]], ...]) -> tuple[Operation, ...]:
    return tuple(operation for _, operations in pieces for operation in operations)


def _look_up(rows: int, width: int, price: Pricer) -> Operation:
    looked_up = price.pointwise("embedding", width, width, saved=0 if price.norms_copy else width)
    # Its gradient is a sum into the rows of the table, most of which stay zero.
    table = float(4 * rows * width) if price.trained else 0.0
    backward = Workload(bytes=looked_up.forward.bytes + table, kernels=2)
    return replace(looked_up, backward=backward)


def _block(
    shape: Shape, experts: Experts | None, price: Pricer, apart: Pricer, run: Run
) -> Iterator[tuple[str, tuple[Operation, ...]]]:
    """The pieces of a block in order: what lies in it, in its attention, in its feed-forward."""
    names, width, degree = shape.naming, shape.width, run.tensor_parallel
    query, kv = shape.query_width, shape.kv_width
    wire = (_wire("sum", price, width, degree), _pieces(price, width)) if degree > 1 else ()
    norm = apart.norm("norm", width, gathered=degree)
    yield "", (norm,)
    attention = _from_latent(shape, price) if shape.latent else _projections(shape, price)
    looked = [query + 2 * kv] if names.joint else [query, kv, kv]
    if run.lora_on is Adapted.QUERY_VALUE:
        looked = looked[::2]
    attention += adapters(price, run, *((width, out) for out in looked))
    if shape.bias or shape.qkv_bias:
        attention.append(_bias(price, query + 2 * kv))
    if names.joint:  # gradients of the three are put side by side
        joint = 2.0 * (query + 2 * kv)
        attention.append(price.pointwise("join", 0, 0, kernels=0, backward=(joint, 1)))
    if shape.latent:  # what positions turn, and what they do not, side by side
        attention.append(price.rotary(2 * query))
    elif shape.rotary:
        attention.append(price.rotary(query + kv))
    if shape.query_key_norm is not HeadNorm.NONE:
        turned = shape.rotary or shape.latent is not None  # which reads no output of norms again
        norm_of = price.norm("query and key norm", query + kv, gathered=0 if turned else 1)
        attention.append(norm_of)
    head = shape.head_width
    if shape.latent:  # its values are narrower than its keys
        head = (head + shape.latent.value) // 2
    mask = replace(apart.pointwise("dropout", width, width), saved_bytes=apart.tokens * width)
    dropped = (mask,) if shape.dropout and not price.fused else ()
    looks = price.attention(
        shape.heads, shape.kv_heads, head, window=shape.window, dropout=shape.dropout
    )
    attention.append(looks)
    attention.append(price.matmul("attention out", shape.out_width, width))
    if shape.bias or shape.out_bias:
        attention.append(_bias(price, width))
    if run.lora_on is not Adapted.QUERY_VALUE:
        attention += adapters(price, run, (query, width))
    yield names.attention, (*attention, *wire, *dropped)
    own_norm = (norm,) if names.after_attention else ()  # keeps its input, not its output
    kept = 0 if apart.norms_copy else width
    add = apart.pointwise("add", 2 * width, width, saved=kept, backward=(3.0 * width, 1))
    if run.lora_on is not Adapted.ALL:  # nothing reads for adapters in what follows
        price = replace(price, keeps_inputs=price.trained)
        norm = replace(apart, keeps_inputs=price.trained).norm("norm", width, gathered=degree)
    yield "", (*own_norm, add, norm)
    if experts is not None and run.expert_parallel > 1:
        before, own, after = _at_experts(shape, experts, price, run)
        yield f"{names.feed_forward}.router", before
        yield f"{names.feed_forward}.experts", own
        yield names.feed_forward, after
    else:
        yield names.feed_forward, (*_feed_forward(shape, experts, price, run), *wire, *dropped)
    yield "", (*own_norm, add)


def _projections(shape: Shape, price: Pricer) -> list[Operation]:
    """Queries, keys, values; those that positions turn are kept after turning."""
    query, kv, width = shape.query_width, shape.kv_width, shape.width
    if shape.naming.joint:  # values are a view of the whole, also where the rest is turned
        out = query + 2 * kv
        return [price.matmul("query, key, value", width, out, saved=out, normed=True)]
    kept = 0 if shape.rotary else 1
    return [
        price.matmul("query", width, query, saved=kept * query, normed=True),
        price.matmul("key", width, kv, saved=kept * kv, normed=True),
        price.matmul("value", width, kv, saved=kv, normed=True),
    ]


def _from_latent(shape: Shape, price: Pricer) -> list[Operation]:
    made = []
    for name, (out, into) in shape.latent_matrices.items():
        if "_b_" in name:
            made.append(price.norm(f"norm before {name}", into))
        # Values are a part of what the last one gives, which is kept whole.
        kept = out if name == "kv_b_proj" or "_a_" in name else 0
        made.append(price.matmul(name, into, out, saved=kept, normed="_b_" not in name))
    return made


def _feed_forward(
    shape: Shape, experts: Experts | None, price: Pricer, run: Run
) -> list[Operation]:
    if experts is None:
        return _dense(shape, shape.hidden, price, run)
    return [each for part in _at_experts(shape, experts, price, run) for each in part]


def _at_experts(
    shape: Shape, experts: Experts, price: Pricer, run: Run
) -> tuple[tuple[Operation, ...], tuple[Operation, ...], tuple[Operation, ...]]:
    """The work on tokens before they are at experts, there, and afterwards.

    Rows for experts that are dealt out travel there and back. What arrives is kept in place of what
    was sent, and is that of the fullest device.
    """
    routed, width, hidden = experts.active, shape.width, experts.hidden
    rows = float(routed * width)
    travels = run.expert_parallel > 1
    padded = run.experts is ExpertKernel.PADDED
    # The fullest gets all, at most: a device what is sent, an expert a row of each token.
    arrived = replace(price, tokens=round(price.tokens * min(run.fullest, run.expert_parallel)))
    most = min(run.fullest, experts.routed / routed)
    here = replace(price, tokens=round(price.tokens * most)) if padded else arrived
    dispatch, combine = _moved_rows(price, rows, width, experts.count, run)
    router = price.matmul("router", width, experts.routed)
    if experts.wide_router:
        router = replace(router, saved_bytes=4 * price.tokens * width)
    before = [router, replace(dispatch, saved_bytes=0) if travels or padded else dispatch]
    ups = 2 if shape.gated else 1
    own = [
        here.experts("experts up", width, ups * hidden, routed, experts.count),
        _activation(shape, routed * hidden, here),
        here.experts("experts down", hidden, width, routed, experts.count),
    ]
    after = [combine]
    if padded:
        own = [*_padding(arrived, here, rows, experts.count, own)]
    if run.experts is ExpertKernel.SLICED:
        own = [_sliced(each, experts.count) for each in own]
    if travels:
        before.append(_exchange("rows to experts", arrived, rows, kept=not padded))
        after.insert(0, _exchange("rows from experts", arrived, rows))
        if run.experts is not ExpertKernel.FUSED:  # what arrives is by sender, not yet by expert
            own.insert(0, _in_order("rows by expert", arrived, rows))
            own.append(_in_order("rows by sender", arrived, rows))
    if experts.shared:
        after += _dense(shape, experts.shared, price, run)
    if experts.gated_shared:
        after.append(price.pointwise("shared gate", width, width, saved=width))
    return tuple(before), tuple(own), tuple(after)


def _moved_rows(
    price: Pricer, rows: float, width: int, count: int, run: Run
) -> tuple[Operation, Operation]:
    """Put rows in the order of ``count`` experts, and add up what these give for each token.

    Added into rows that others add to as well, by atomic operations, they move at `_ADDED_SHARE`.
    """
    if run.experts is ExpertKernel.FUSED:
        return (
            price.pointwise("dispatch", rows, rows, saved=rows, kernels=2),
            price.pointwise("combine", rows, width, saved=width, kernels=2),
        )
    added = 2.0 * rows / _ADDED_SHARE
    dispatch = price.pointwise("dispatch", rows, rows, saved=rows, kernels=4, backward=(added, 8))
    combine = price.pointwise("combine", rows, width, saved=width, kernels=4)
    combine = replace(
        combine, forward=replace(combine.forward, bytes=price.item * price.tokens * added)
    )
    if run.experts not in ONE_BY_ONE:
        return dispatch, combine
    # Each expert looks for its rows, which the host has to know the number of; the gradient of all
    # tokens is made and added up for each.
    launched, all_tokens = dispatch.backward, 4.0 * price.item * price.tokens * width * count
    return (
        replace(
            dispatch,
            forward=replace(dispatch.forward, kernels=8 * count),
            backward=replace(launched, kernels=14 * count, bytes=launched.bytes + all_tokens),
        ),
        replace(combine, forward=replace(combine.forward, kernels=3 * count)),
    )


def _padding(
    arrived: Pricer, here: Pricer, rows: float, count: int, products: list[Operation]
) -> Iterator[Operation]:
    """Put ``products`` of padded rows, priced by ``here``, between copies to and from their places.

    Each of ``count`` experts has a slice, copied by itself. In backward, a slice that was written
    in place clones the whole gradient, and one that was read adds a whole one, zero elsewhere.
    """

    def copied(name: str, written: float, read: float) -> Operation:
        forward = Workload(bytes=item * (written + 2 * real), kernels=2 * count)
        backward = Workload(bytes=item * count * (2 * written + 4 * read), kernels=6 * count)
        kept = int(item * written)
        return Operation(name, Kind.MEMORY, forward, backward, kept, kept, 0, 2 * kept)

    item = here.item
    real, wide = (each.tokens * rows for each in (arrived, here))
    *others, last = products
    yield copied("padding", wide, real)
    yield from (*others, replace(last, saved_bytes=last.saved_bytes - last.output_bytes))
    yield copied("unpadding", real, wide)


def _sliced(product: Operation, count: int) -> Operation:
    """The gradient of each slice of a stack is a whole stack, zero elsewhere, added to the others.

    Three bytes move for each of the stack's.
    """
    if product.kind is not Kind.MATMUL:
        return product
    _, n, k = product.forward.shape or (0, 0, 0)
    whole = 2.0 * count * n * k
    backward = product.backward
    return replace(
        product,
        backward=replace(backward, bytes=backward.bytes + 3 * count * whole, kernels=5 * count),
    )


def _in_order(name: str, price: Pricer, rows: float) -> Operation:
    """Rows copied with a row of zeros behind them, then put in order; kept by nobody."""
    added = 2.0 * rows / _ADDED_SHARE if name == "rows by expert" else 2.0 * rows
    made = price.pointwise(name, 2 * rows, 2 * rows, kernels=4, backward=(added, 4))
    return replace(made, output_bytes=0, backward_scratch_bytes=0)


def _dense(shape: Shape, hidden: int, price: Pricer, run: Run) -> list[Operation]:
    made: list[Operation] = []
    for name in ("gate", "up") if shape.gated else ("up",):
        made.append(
            price.matmul(f"feed-forward {name}", shape.width, hidden, saved=hidden, normed=True)
        )
        if run.lora_on is Adapted.ALL:
            made += adapters(price, run, (shape.width, hidden))
    made.append(_activation(shape, hidden, price))
    made.append(price.matmul("feed-forward down", hidden, shape.width))
    if shape.bias:
        made.append(_bias(price, hidden + shape.width))
    if run.lora_on is Adapted.ALL:
        made += adapters(price, run, (hidden, shape.width))
    return made


def _bias(price: Pricer, width: int) -> Operation:
    """Added by the matrix product itself; its gradient is a sum over tokens."""
    return price.pointwise("bias", 0, 0, kernels=0, backward=(float(width), 1))


def _activation(shape: Shape, hidden: int, price: Pricer) -> Operation:
    out = int(price.keeps_inputs)
    if not shape.gated:
        parts = 0 if price.fused else shape.gelu_parts
        moved, launched = (1 + 2 * parts) * hidden, 1 + 2 * parts
        return price.pointwise(
            "activation",
            moved,
            moved,
            saved=(out + parts * max(price.wide_item, price.item) / price.item) * hidden,
            kernels=launched,
            backward=(3.0 * moved, launched),
        )
    if price.fused_parts:
        return price.pointwise(
            "activation", 2 * hidden, hidden, saved=out * hidden, backward=(5.0 * hidden, 1)
        )
    backward, kept = (9 * hidden, 3), (1 + out) * hidden
    return price.pointwise(
        "activation", 3 * hidden, 2 * hidden, saved=kept, kernels=2, backward=backward
    )


def _exchange(name: str, price: Pricer, rows: float, *, kept: bool = False) -> Operation:
    """An all-to-all of ``rows`` features a token; their gradients go the other way."""
    size = int(price.item * price.tokens * rows)
    # Counts come first, and the host waits for them: two collectives in forward, one in backward.
    there, back = Workload(bytes=float(size), kernels=3), Workload(bytes=float(size))
    saved = size if kept else 0
    return Operation(name, Kind.EXCHANGE, there, back, saved, size, 0, 2 * size, cheap=False)


def _wire(name: str, price: Pricer, width: int, degree: int) -> Operation:
    """An all-reduce of activations among the devices that share a layer, in both directions."""
    sent = price.item * price.tokens * width * 2 * (degree - 1) / degree
    return Operation(name, Kind.WIRE, Workload(bytes=sent), Workload(bytes=sent), cheap=False)


def _pieces(price: Pricer, width: int) -> Operation:
    """Joining and cutting pieces, which DTensor copies since tokens are not the first dimension."""
    made = price.pointwise("pieces", 2.0 * width, 2.0 * width, kernels=2)
    backward = replace(made.backward, bytes=made.forward.bytes)
    return replace(made, backward=backward, output_bytes=0, backward_scratch_bytes=0)
