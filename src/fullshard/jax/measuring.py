# SPDX-License-Identifier: Apache-2.0
"""A pytree of parameters and its loss, measured on one device, for planning.

XLA decides by itself what is kept for backward, what is fused and what is computed again; so a step
is compiled for one device, from shapes alone, and asked what it needs. Which part of it belongs to
which module cannot be told from a compiled program: the recording has one call, and the planner
treats the tree as one unit.
"""

from collections.abc import Callable
from typing import Any

import jax

from fullshard.core.errors import ConfigurationError
from fullshard.core.spec import ITEM_BYTES, ParamSpec
from fullshard.jax.arrays.leaves import path_name
from fullshard.plan.measured.recording import (
    MarkKind,
    MemoryUse,
    RecordedCall,
    RecordedOp,
    StepMark,
    StepRecording,
)

__all__ = ["record_step"]


def record_step(loss: Callable[..., Any], params: Any, *args: Any) -> StepRecording:
    """Record forward and backward of ``loss(params, *args)``, a scalar, as XLA compiles it.

    Leaves of ``params`` and ``args`` tell shapes and dtypes (arrays or `jax.ShapeDtypeStruct`).
    Parameters are named by their paths in the tree, such as ``blocks.0.kernel``; those that are not
    of floating point are frozen. What the program needs beside parameters, arguments and gradients
    counts as activations; its FLOPs and bytes are XLA's own count. Nothing is run.

    Raises:
        ConfigurationError: for leaves without shape and dtype, or without one to train.
    """
    shapes = jax.tree.map(_shape_of, (params, args))
    specs = tuple(
        ParamSpec(path_name(path), tuple(leaf.shape), leaf.dtype.name, _trains(leaf))
        for path, leaf in jax.tree.leaves_with_path(shapes[0])
    )
    trained = [number for number, spec in enumerate(specs) if spec.trainable]
    if not trained:
        raise ConfigurationError("no leaf of the parameters is of floating point: nothing to train")
    unknown = sorted({spec.dtype for spec in specs} - ITEM_BYTES.keys())
    if unknown:
        raise ConfigurationError(f"parameters of dtype {', '.join(unknown)} cannot be planned")
    compiled = _compiled(loss, shapes)
    needs, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    flops, moved = float(costs.get("flops", 0.0)), int(costs.get("bytes accessed", 0))
    marks = [
        StepMark(MarkKind.FORWARD_BEGIN, 0),
        StepMark(MarkKind.ALLOCATE, 0),
        StepMark(MarkKind.OP, 0),
        StepMark(MarkKind.FORWARD_END, 0),
        StepMark(MarkKind.OUTPUT_GRADIENT, 0),
        *(StepMark(MarkKind.GRADIENT, number) for number in reversed(trained)),
        StepMark(MarkKind.RELEASE, 0),
        StepMark(MarkKind.OUTPUTS_GONE, 0),
        StepMark(MarkKind.BACKWARD_OVER, 0),
    ]
    return StepRecording(
        specs,
        (RecordedCall(""),),
        (),
        ((int(needs.temp_size_in_bytes), MemoryUse.ACTIVATIONS),),
        (RecordedOp("step", "", flops, moved),),
        tuple(marks),
        buffers_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes[1])),
    )


def _compiled(loss: Callable[..., Any], shapes: tuple[Any, tuple[Any, ...]]) -> Any:
    params, args = shapes
    trained = jax.tree.map(lambda x: x if _trains(x) else None, params)

    def of_trained(trained: Any, args: tuple[Any, ...], frozen: Any) -> Any:
        whole = jax.tree.map(
            lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
        )
        return loss(whole, *args)

    frozen = jax.tree.map(lambda x: None if _trains(x) else x, params)
    return jax.jit(jax.value_and_grad(of_trained)).lower(trained, args, frozen).compile()


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    try:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    except AttributeError:
        raise ConfigurationError(
            f"{type(leaf).__name__} in the tree has no shape and dtype; give arrays or "
            "jax.ShapeDtypeStruct"
        ) from None


def _trains(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating))
