# SPDX-License-Identifier: Apache-2.0
"""Operations of transformers, priced: floating-point operations, bytes moved, bytes kept."""

from dataclasses import dataclass, replace

from fullshard.core.spec import item_bytes
from fullshard.plan.model.operations import Kind, Operation, Workload
from fullshard.plan.run import AttentionKernel, Loss, Run

# Bytes that a score moves in forward and in backward: PyTorch's math kernel on a B200, in the table
# that devices.toml names, and transformers' own attention on an H100 (benchmarks/data/measured).
# And what is kept of it beside a softmax in float32: the eager one a cast to the values' dtype.
_SCORE_BYTES = {AttentionKernel.MATH: (77.0, 36.0), AttentionKernel.EAGER: (32.0, 40.0)}
# Windows leave out no work of these.
_WHOLE = (*_SCORE_BYTES, AttentionKernel.MASKED, AttentionKernel.EFFICIENT)
_PIECE_TOKENS = 2048  # of a chunked loss
# Each piece reads all weights twice and adds to their gradient: what of it products do not hide.
_PIECE_READS = 2.0
_KEEPING = (Loss.PLAIN, Loss.KEPT, Loss.NATIVE)  # whose callers have the logits


@dataclass(frozen=True)
class Pricer:
    """Prices operations on ``tokens`` tokens in samples of ``length``.

    ``item`` is the bytes of an activation's element, ``trained`` is false if the weights of matrix
    products get no gradients; what these read is kept with ``keeps_inputs`` alone. With ``fused``
    neighbouring element-wise operations are one kernel, as a compiler makes them: each reads its
    inputs and writes its outputs once; with ``fused_parts`` rotations and gates are, as Liger's
    kernels have them. With ``casts`` the residual stream and the weights are float32, and autocast
    keeps a copy in its own dtype of each weight and, for each product apart, of what norms give it.
    ``wide_item`` is the bytes of an element of what autocast computes in float32, such as powers.
    """

    tokens: int
    length: int
    item: int
    trained: bool = True
    keeps_inputs: bool = True
    fused: bool = False
    fused_parts: bool = False
    fused_norms: bool = True
    kernel: AttentionKernel = AttentionKernel.FLASH
    casts: bool = False
    wide_item: int = 0
    wide_norms: bool = False
    layer_norms: bool = False

    @classmethod
    def of(cls, run: Run, length: int) -> "Pricer":
        """The prices under ``run``, whose samples have ``length`` tokens."""
        return cls(
            run.micro_batch * length,
            length,
            item_bytes(run.compute_dtype),
            run.lora_rank == 0,
            run.lora_rank == 0 or not run.wide_adapters,
            run.compiled,
            run.compiled or run.fused_parts,
            run.compiled or run.fused_parts or run.fused_norms,
            run.attention,
            run.autocast is not None and item_bytes(run.autocast) < run.full_item,
            4 if run.autocast is not None and not run.compiled else item_bytes(run.compute_dtype),
        )

    def matmul(
        self,
        name: str,
        into: int,
        out: int,
        *,
        saved: int = 0,
        trained: bool | None = None,
        normed: bool = False,
    ) -> Operation:
        """``into`` features to ``out``; ``saved`` features a token of its output are kept.

        Those that come out of a norm, ``normed``, may have to be cast first.
        """
        times = 2 if (self.trained if trained is None else trained) else 1
        made = self._products(name, (self.tokens, out, into), 1, times, saved)
        if not (self.casts and normed):
            return made
        return replace(made, saved_bytes=made.saved_bytes + self.item * self.tokens * into)

    def experts(self, name: str, into: int, out: int, active: int, count: int) -> Operation:
        """Products with ``active`` of ``count`` experts a token: all weights are read.

        Grouped products are not on the lists of what selective recomputation keeps (torchtitan's).
        """
        rows = self.tokens * active
        made = self._products(name, (rows, out, into), count, 2 if self.trained else 1, out)
        return replace(made, cheap=True)

    def _products(
        self, name: str, shape: tuple[int, int, int], count: int, times: int, saved: int
    ) -> Operation:
        """Products of (m, n, k) in all, by ``count`` weights, and ``times`` as many in backward."""
        m, n, k = shape
        flops, moved = 2.0 * m * k * n, float(self.item * (m * (k + n) + count * k * n))
        each = (max(1, m // count), n, k)
        return Operation(
            name,
            Kind.MATMUL,
            Workload(flops, moved, shape=each, count=count),
            Workload(times * flops, times * moved, kernels=times, shape=each, count=times * count),
            saved_bytes=self.item * (m * saved + (count * k * n if self.casts else 0)),
            output_bytes=self.item * m * n,
            backward_scratch_bytes=self.item * m * (k + n),
            cheap=False,
        )

    def attention(
        self, heads: int, kv_heads: int, head_width: int, *, window: int = 0, dropout: bool = False
    ) -> Operation:
        """A fused kernel that keeps its output and one float32 a row (arXiv:2307.08691).

        A causal mask halves the work; backward computes the scores again: 5 products for 2. Others
        make all scores, and keep their softmax in float32.
        """
        span, seen = self.length / 2, self.length
        if self.kernel in _WHOLE:
            window = 0
        if window and window < self.length:
            span, seen = min(span, window), window
        flops = 4.0 * self.tokens * span * heads * head_width
        features = (2 * heads + 2 * kv_heads) * head_width
        moved = float(self.item * self.tokens * features)
        kept = self.tokens * (self.item * heads * head_width + 4 * heads)
        if self.kernel in _WHOLE:  # they want as many heads of keys and values as of queries
            kept += self.item * self.tokens * 2 * (heads - kv_heads) * head_width
        shape, moved_back = (seen, heads, head_width), 2.0 * moved
        scores = self.tokens * heads * self.length
        in_memory = self.kernel in _SCORE_BYTES
        if in_memory:
            moved, moved_back = (scores * each for each in _SCORE_BYTES[self.kernel])
            cast = self.item if self.item < 4 and self.kernel is AttentionKernel.EAGER else 0
            kept += (4 + cast + dropout) * scores  # softmax in float32, its cast, a mask
        return Operation(
            "attention",
            Kind.ATTENTION,
            Workload(flops, moved, shape=shape),
            Workload(2.5 * flops, moved_back, kernels=3, shape=shape),
            saved_bytes=kept,
            scratch_bytes=4 * scores if in_memory else 0,
            output_bytes=self.item * self.tokens * heads * head_width,
            backward_scratch_bytes=self.item * self.tokens * features,
            cheap=False,
        )

    def pointwise(
        self,
        name: str,
        reads: float,
        writes: float,
        *,
        saved: float = 0.0,
        kernels: int = 1,
        backward: tuple[float, int] | None = None,
    ) -> Operation:
        """Element-wise work on ``reads`` and ``writes`` features a token, in activations' items.

        ``backward`` is (features moved, kernels), by default twice the forward's.
        """
        moved, launched = backward or (2 * (reads + writes), 2 * kernels)
        unit = self.item * self.tokens
        return Operation(
            name,
            Kind.MEMORY,
            Workload(bytes=unit * (reads + writes), kernels=1 if self.fused else kernels),
            Workload(bytes=unit * moved, kernels=1 if self.fused else launched),
            saved_bytes=int(unit * saved),
            output_bytes=int(unit * writes),
            backward_scratch_bytes=int(unit * writes),
        )

    def norm(self, name: str, width: int, *, gathered: int = 1) -> Operation:
        """A normalisation of ``width`` features in one kernel, two in backward.

        Not fused, it goes through float32 in six: to float32, square, mean, scale, back, weight;
        ``wide`` ones come back last. Backward then moves 90 bytes an element in 16 bits (H100).
        Its output is kept by the products that read it, unless they cast it: that of all
        ``gathered`` devices among which tokens are cut, where these share the products.
        """
        kept = float(width * gathered) if self.keeps_inputs and not self.casts else 0.0
        if self.layer_norms:  # PyTorch's own is one kernel, and keeps its input as eager models do
            kept += 0 if self.fused_norms else width
        elif not self.fused_norms:
            wide = self.pointwise(
                name, 10.0 * width, 8.0 * width, kernels=6, backward=(45.0 * width, 14)
            )
            # Weights that learn keep what they multiply.
            product = (4 if self.wide_norms else self.item) * self.trained
            saved = (4 * self.norms_copy + product) * width + self.item * kept
            return replace(wide, saved_bytes=int(self.tokens * saved))
        return self.pointwise(name, width, width, saved=kept, backward=(5.0 * width, 2))

    @property
    def norms_copy(self) -> bool:
        """True if norms keep a float32 copy in place of what they read."""
        return self.item < 4 and not (self.layer_norms or self.fused_norms)

    def rotary(self, width: int) -> Operation:
        """Turns ``width`` features of queries and keys; in float32 unless fused."""
        if self.fused_parts:
            return self.pointwise("rotary", width, width, saved=width, backward=(2.0 * width, 1))
        return self.pointwise(
            "rotary", 4.0 * width, 4.0 * width, saved=width, kernels=6, backward=(8.0 * width, 6)
        )

    def head(
        self, width: int, vocab: int, loss: Loss, *, trained: bool, degree: int = 1
    ) -> tuple[Operation, ...]:
        """The projection to ``vocab`` logits and their cross-entropy, as ``loss`` says.

        Eager ones keep float32 log-probabilities and make two float32 gradients: 12 bytes a logit
        under FREED, 16 under KEPT, and 22 under PLAIN, whose caller keeps the logits, their float32
        copy and that one's shifted copy. NATIVE has log-probabilities and two gradients beside
        logits, all in their own dtype. A vocabulary that is cut over ``degree`` devices is gathered
        for callers that keep logits; over others DTensor's loss makes three such temporaries.
        COMPILED has 16 bits of logits and of their gradient, FUSED writes
        the gradient in place of the logits, FUSED_FLOAT32 in place of a float32 copy of their
        shifted float32 copy, CHUNKED holds the logits of 2,048 tokens at a time, FUSED_LINEAR those
        that take as much as its input does, whose gradient its forward makes and keeps.
        """
        project = self.matmul("head", width, vocab, trained=trained, normed=True)
        logits = self.item * self.tokens * vocab
        whole = degree > 1 and loss in _KEEPING
        arrived = vocab * degree if whole else vocab
        work, kept, scratch, back = self._loss(loss, width, arrived, degree > 1 and not whole)
        sent = Workload(bytes=float(logits * (degree - 1)))
        gathered = Operation("logits", Kind.WIRE, sent, Workload(), cheap=False, logits=True)
        return (
            replace(
                project,
                output_bytes=0 if loss in (Loss.CHUNKED, Loss.FUSED_LINEAR) else logits,
                backward_scratch_bytes=0,
                logits=True,
            ),
            *((gathered,) if whole else ()),
            Operation(
                "loss",
                Kind.MEMORY,
                *work,
                saved_bytes=kept,
                scratch_bytes=scratch,
                backward_scratch_bytes=back,
                held_bytes=self._held(loss, arrived),
                logits=True,
            ),
        )

    def _held(self, loss: Loss, vocab: int) -> int:
        """Bytes that the caller keeps, and the gradient of logits that go into a whole graph."""
        item = self.item
        kept = {Loss.PLAIN: item + 4 + 4 * (item < 4), Loss.KEPT: 4, Loss.NATIVE: item}.get(loss, 0)
        return self.tokens * vocab * (kept + (item if kept and self.fused else 0))

    def _loss(
        self, loss: Loss, width: int, vocab: int, cut: bool
    ) -> tuple[tuple[Workload, Workload], int, int, int]:
        """The work of a loss in both directions, and bytes: kept, of forward, of backward."""
        item, tokens = self.item, self.tokens
        logits, wide = item * tokens * vocab, 4 * tokens * vocab
        if loss in (Loss.PLAIN, Loss.KEPT, Loss.FREED):
            # To float32, log-softmax, pick; one of a cut vocabulary is made of single kernels.
            reads, backs = (9, 8) if cut else (5, 5)
            work = (
                Workload(bytes=float(logits + reads * wide), kernels=7 if cut else 4),
                Workload(bytes=float(backs * wide + logits), kernels=6 if cut else 4),
            )
            copy = wide if item < 4 else 0
            kept, scratch = {
                Loss.PLAIN: (2 * wide + logits + copy, 0),
                Loss.KEPT: (2 * wide, wide),
                Loss.FREED: (wide, copy),
            }[loss]
            # Backward makes the gradient of log-probabilities, then that of the float32 copy.
            return work, kept, scratch, (3 if cut else 2) * wide
        if loss is Loss.NATIVE:
            work = Workload(bytes=3.0 * logits, kernels=3), Workload(bytes=4.0 * logits, kernels=3)
            return work, 2 * logits, 0, 2 * logits
        if loss is Loss.COMPILED:
            work = Workload(bytes=2.0 * logits, kernels=2), Workload(bytes=2.0 * logits, kernels=1)
            return work, logits, 0, logits
        if loss is Loss.FUSED:
            work = Workload(bytes=3.0 * logits, kernels=1), Workload(bytes=1.0 * logits, kernels=1)
            return work, logits, 0, 0
        if loss is Loss.FUSED_FLOAT32:
            # Copied twice in forward; backward fills the unshifted gradient from the shifted one.
            work = Workload(bytes=5.0 * wide, kernels=3), Workload(bytes=4.0 * wide, kernels=3)
            return work, wide, wide - logits, wide  # 16-bit logits go when these are made
        piece = min(tokens, _PIECE_TOKENS)
        if loss is Loss.FUSED_LINEAR:
            # As many pieces as logits are larger than what they are of; each reads all weights.
            piece = 1 << (-(-tokens * width // vocab) - 1).bit_length()
            pieces = -(-tokens // piece)
            moved = 3.0 * logits + _PIECE_READS * pieces * item * width * vocab
            work = Workload(bytes=moved, kernels=6 * pieces), Workload()
            return work, item * tokens * width, piece * vocab * item, 0
        launched = -(-tokens // piece) * 6
        # Each piece as a plain loss, made again in backward.
        once = float(logits + 5 * wide)
        work = (
            Workload(bytes=once, kernels=launched),
            Workload(bytes=2 * once, kernels=2 * launched),
        )
        return work, 0, piece * vocab * (item + 4), 0
