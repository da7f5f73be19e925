# SPDX-License-Identifier: Apache-2.0
"""LoRA's adapters beside the matrices of blocks: their parameters, and the work that they add."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from fullshard.core.spec import ModelSpec, ParamSpec
from fullshard.plan.model.operations import Operation
from fullshard.plan.model.shape import Naming
from fullshard.plan.model.work import Pricer
from fullshard.plan.run import Adapted, Run


@lru_cache(maxsize=64)
def with_adapters(spec: ModelSpec, run: Run, names: Naming) -> ModelSpec:
    """``spec`` frozen, with two trained matrices beside each that ``run`` adapts, if it does."""
    return ModelSpec(tuple(_adapted(spec, run, names))) if run.lora_rank else spec


def _adapted(spec: ModelSpec, run: Run, names: Naming) -> Iterator[ParamSpec]:
    query_value = names.query, names.value, names.joint
    for param in spec:
        yield replace(param, trainable=False)
        path = param.name.removesuffix(".weight")
        adapted = {
            Adapted.ALL: True,
            Adapted.ATTENTION: f".{names.attention}." in path,
            Adapted.QUERY_VALUE: path.rpartition(".")[2] in query_value,
        }[run.lora_on]
        matrix = len(param.shape) == 2 and not path.endswith("bias")
        if adapted and matrix and path.startswith(names.blocks + "."):
            out, into = param.shape
            yield ParamSpec(f"{path}.lora_A.weight", (run.lora_rank, into), run.lora_dtype)
            yield ParamSpec(f"{path}.lora_B.weight", (out, run.lora_rank), run.lora_dtype)


def adapters(price: Pricer, run: Run, *matrices: tuple[int, int]) -> list[Operation]:
    """LoRA's two small products beside each of ``matrices`` (features in, out), scaled and added.

    Each casts its input for itself where it is in another dtype, and keeps the copy: PEFT casts it
    to the adapter's, from which autocast casts it back.
    """
    rank, made = run.lora_rank, list[Operation]()
    wide = run.wide_adapters and run.autocast is None
    own = replace(price, item=4) if wide else price
    for into, out in matrices if rank else ():
        if (run.wide_adapters or price.casts) and not price.fused:
            back = 0 if wide else into
            made.append(
                price.pointwise(
                    "adapter cast", into + 2 * back, 2 * into + back, saved=back or 2 * into,
                    kernels=1 if wide else 2, backward=(6.0 * into, 2),
                )
            )  # fmt: skip
        made += [
            own.matmul("adapter down", into, rank, saved=rank, trained=True),
            own.matmul("adapter up", rank, out, trained=True),
            own.pointwise(
                "scale and add", 3.0 * out, 2.0 * out, kernels=2 + wide,
                backward=((5.0 if wide else 2.0) * out, 1 + 2 * wide),
            ),
        ]  # fmt: skip
    return made
