# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run: everything that the user, or the search, may choose."""

from dataclasses import dataclass, field
from enum import Enum

from fullshard.core.errors import ConfigurationError, check_whole
from fullshard.core.layout import Align
from fullshard.core.spec import item_bytes
from fullshard.core.strategy import Offload, Precision, Prefetch, ShardingStrategy


class Wrap(Enum):
    """The modules that become units beside the root."""

    NONE = "none"  # the root alone
    BLOCK = "block"  # each block
    PART = "part"  # each part: attention, feed-forward, embedding, head
    BLOCK_AND_ENDS = "block+ends"  # each block, the embedding and the head


class Recompute(Enum):
    """The activations that forward drops and backward computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # element-wise operations and each second matrix product
    FULL = "full"  # all but the inputs of blocks


class Loss(Enum):
    """The way to compute the last projection and the cross-entropy."""

    PLAIN = "plain"  # logits, a float32 copy, a shifted one: the caller keeps all three
    KEPT = "kept"  # the caller keeps float32 logits, as transformers' outputs do
    FREED = "freed"  # nobody keeps what backward does not read
    NATIVE = "native"  # of 16-bit logits in 16 bits, which are kept: no float32 copy
    COMPILED = "compiled"  # one graph with the model: no float32 in memory
    FUSED = "fused"  # one kernel over the logits, gradient in place
    FUSED_FLOAT32 = "fused-float32"  # the same over float32 logits, as transformers' models make
    FUSED_LINEAR = "fused-linear"  # pieces of the tokens, gradients made in forward, as Liger's
    CHUNKED = "chunked"  # projection and loss over pieces of the tokens


class AttentionKernel(Enum):
    """The kernel that computes attention."""

    FLASH = "flash"  # not told: what PyTorch picks, cuDNN on Hopper and Blackwell, else the next
    FLASH2 = "flash2"  # arXiv:2307.08691
    FLASH3 = "flash3"  # arXiv:2407.08608, Hopper
    FLASH4 = "flash4"  # Hopper and Blackwell
    CUDNN = "cudnn"
    MASKED = "masked"  # what PyTorch picks beside a mask, as of padding: no score is left out
    EFFICIENT = "efficient"  # beside a mask memory-efficient ones, as PyTorch picked before 2.11
    EAGER = "eager"  # written by hand, as transformers do: scores in memory, softmax in float32
    MATH = "math"  # PyTorch's own: scores in memory, in float32
    TRITON = "triton"  # the first FlashAttention as a Triton kernel, of 2022 and 2023


class ExpertKernel(Enum):
    """The way to compute the experts of a block."""

    GROUPED = "grouped"  # stacked: PyTorch's grouped product, rows put in order by its indexing
    FUSED = "fused"  # the same, rows moved by kernels of their own, as DeepEP and Megatron have
    PADDED = "padded"  # stacked, each with as many rows as the fullest: batched products
    LOOP = "loop"  # one after another, as transformers had them; the host waits for each
    SLICED = (
        "sliced"  # the same out of a stack, as transformers have them: whole gradients for each
    )


ONE_BY_ONE = (ExpertKernel.LOOP, ExpertKernel.SLICED)


class Adapted(Enum):
    """The matrices of blocks that LoRA has adapters beside."""

    ALL = "all"
    ATTENTION = "attention"
    QUERY_VALUE = "query-value"  # PEFT's choice, where it is told none


class OptimizerKernels(Enum):
    """The kernels of an optimizer's step."""

    FUSED = "fused"  # all of an update in one
    FOREACH = "foreach"  # one for each operation, over all parameters
    LOOP = "loop"  # one for each operation and parameter


class Engine(Enum):
    """The engine that gathers and reduces."""

    FULLSHARD = "fullshard"
    FSDP1 = "fsdp1"  # PyTorch's first: keeps gradients of the inputs of frozen units, too
    FSDP2 = "fsdp2"  # PyTorch's: copies out of what it gathers, and into what it reduces
    OTHER = "other"  # DeepSpeed, Megatron and others, told as FSDP2 with a wider interval


OPTIMIZERS: dict[str, int] = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
"""States per parameter, each in the dtype in which the parameter rests."""

_MOST_IMBALANCE = 1e6


@dataclass(frozen=True)
class Run:
    """The configuration of a training run.

    ``micro_batch`` is samples per device and forward, ``sequence`` their length (0: the model's),
    ``accumulate`` micro-batches per step; with ``sync_each`` false full gradients are kept between
    them and reduced once. ``param_dtype`` is how parameters rest; ``precision`` says in which
    dtypes they are gathered and reduced, ``autocast`` in which the model computes if not that of
    the gathered ones; with ``tf32`` products of float32 are made in TF32, which PyTorch does not
    unless it is told to. ``replicas`` is the number of groups under hybrid sharding.
    ``recompute_every`` n recomputes each n-th block, ``recompute_blocks`` only so many; with
    ``recompute_stops`` it ends where the last tensor that backward needs is there again (PyTorch
    2.1 and newer). ``lora_rank`` 0 trains all parameters; adapters are
    ``lora_on`` matrices, in ``lora_dtype`` (float32 is what PEFT makes since 0.12).
    ``fused_norms`` are one kernel each, and with ``fused_parts`` so are rotations and gates, too.
    ``tensor_parallel`` devices share each layer, and with ``cut_embedding`` the table of tokens,
    which each has whole otherwise. Experts are dealt out over ``expert_parallel``
    devices, to which tokens travel; the fullest device, of padded experts the fullest of them, gets
    ``imbalance`` times its share (None: unknown, 1, but all if padded, as before training);
    ``experts`` says how they are computed (None: unknown, taken for grouped). With
    ``kept_router_loss`` routers keep their loss, which lives as long as it, in a recomputed block
    with all that was computed before. With
    ``fp8`` matrix products run in float8; ``gather_dtype`` is that of gathers on the wire, if it is
    not that of computation. ``align`` is "element" behind the wrapper and "row" behind
    `fully_shard`, unless they are asked for the other. With ``offload_activations`` what blocks
    keep for backward waits in the host's memory. With ``use_cache`` the model hands out keys and
    values, as transformers' do unless they are told not to, and the caller keeps them until
    backward, recomputed blocks or not.
    ``optimizer_kernels`` None is unknown: as fast as fused ones, with the room of foreach ones.
    With ``expandable_segments`` torch's allocator was told to map memory, and leaves no holes.
    ``overhead_s`` is what the loop adds to a step (None: unknown, as much as those of fitted rows).
    """

    micro_batch: int = 1
    sequence: int = 0
    accumulate: int = 1
    sync_each: bool = True
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    replicas: int = 1
    wrap: Wrap = Wrap.BLOCK
    param_dtype: str = "float32"
    precision: Precision = field(
        default_factory=lambda: Precision(compute="bfloat16", reduce="float32")
    )
    recompute: Recompute = Recompute.NONE
    recompute_every: int = 1
    recompute_blocks: int | None = None
    recompute_stops: bool = True
    offload: Offload = field(default_factory=Offload)
    offload_activations: bool = False
    use_cache: bool = False
    prefetch: Prefetch = field(default_factory=Prefetch)
    optimizer: str = "adamw"
    optimizer_kernels: OptimizerKernels | None = None
    lora_rank: int = 0
    lora_on: Adapted = Adapted.ALL
    lora_dtype: str = "float32"
    compiled: bool = False
    loss: Loss = Loss.PLAIN
    attention: AttentionKernel = AttentionKernel.FLASH
    fused_norms: bool = True
    fused_parts: bool = False
    engine: Engine = Engine.FULLSHARD
    tensor_parallel: int = 1
    cut_embedding: bool = False
    expert_parallel: int = 1
    imbalance: float | None = None
    kept_router_loss: bool = False
    experts: ExpertKernel | None = None
    fp8: bool = False
    gather_dtype: str | None = None
    autocast: str | None = None
    tf32: bool = False
    align: Align = "element"
    expandable_segments: bool = False
    overhead_s: float | None = None

    def __post_init__(self) -> None:
        counts = ("micro_batch", "accumulate", "replicas", "recompute_every")
        for name in (*counts, "tensor_parallel", "expert_parallel"):
            check_whole(name, getattr(self, name))
        if self.tensor_parallel > 1 and self.expert_parallel > 1:
            raise ConfigurationError("expert_parallel beside tensor_parallel is not planned")
        if not 1 <= self.fullest <= _MOST_IMBALANCE:
            raise ConfigurationError(
                "imbalance is how many times its share of tokens the fullest of devices that "
                f"experts are dealt out over gets: 1 or more, not {self.imbalance!r}"
            )
        for name in ("sequence", "lora_rank"):
            check_whole(name, getattr(self, name), 0)
        if self.recompute_blocks is not None:
            check_whole("recompute_blocks", self.recompute_blocks, 0)
        if self.offload_activations and self.recompute is Recompute.SELECTIVE:
            raise ConfigurationError(
                "offload_activations goes with recompute none or full, not with selective"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"optimizer {self.optimizer!r} is not known: {', '.join(OPTIMIZERS)}"
            )
        for dtype in (self.param_dtype, self.autocast, self.precision.compute, self.gather_dtype):
            if dtype is not None:
                item_bytes(dtype)

    @property
    def fullest(self) -> float:
        """The share of tokens that ``imbalance`` tells, or the most there is."""
        if self.imbalance is None:
            return _MOST_IMBALANCE if self.experts is ExpertKernel.PADDED else 1.0
        return self.imbalance

    @property
    def compute_dtype(self) -> str:
        """The dtype of activations and matrix products."""
        return self.autocast or self.precision.full_dtype(self.param_dtype)

    @property
    def wide_adapters(self) -> bool:
        """True if adapters are float32 beside activations of 16 bits."""
        return self.lora_dtype == "float32" and self.full_item < 4 and not self.precision.compute

    @property
    def product_dtype(self) -> str:
        """The name under which a device tells its peak for this run's products."""
        return "tfloat32" if self.tf32 and self.compute_dtype == "float32" else self.compute_dtype

    @property
    def full_item(self) -> int:
        """Bytes of an element of gathered parameters, and of the residual stream."""
        return item_bytes(self.precision.full_dtype(self.param_dtype))

    def recomputed(self, block: int) -> bool:
        """True if block number ``block`` recomputes anything."""
        if self.recompute is Recompute.NONE or block % self.recompute_every:
            return False
        limit = self.recompute_blocks
        return limit is None or block // self.recompute_every < limit
