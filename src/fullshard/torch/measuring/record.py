# SPDX-License-Identifier: Apache-2.0
"""One forward and backward of a plain model without values: what it holds and computes, in order.

Fake tensors stand for all that the model computes, so a model on the meta device is recorded in a
moment on any host, however large it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.core.strategy import Precision
from fullshard.plan.measured.recording import MarkKind, MemoryUse, StepRecording
from fullshard.torch.measuring.tape import OpsMode, Tape, watch_module
from fullshard.torch.sharding.find import find_parameters
from fullshard.torch.step.structures import map_tensors, tensors_in
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.buffers import dtype_name, dtype_of
from fullshard.torch.unit.sites import ParamSites, clean_name


def record_step(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> StepRecording:
    """Record ``loss(model(*args, **kwargs))`` and its backward on tensors without values.

    Tensors in ``args`` and ``kwargs`` tell shapes and dtypes only; these and the model may be on
    the meta device. ``loss`` takes the output (by default its attribute ``loss``, else the sum of
    all elements of its floating-point tensors). With ``compute_dtype`` floating-point parameters
    and inputs have that dtype, as mixed precision gathers and casts them. ``device`` is where it is
    said to run, which decides between kernels. Under ``torch.autocast`` that is recorded, too.
    Nothing is changed, and nothing is collective.

    Raises:
        UsageError: if the model is sharded.
        NotSupportedError: if what the model computes depends on values.
        ConfigurationError: if the loss needs no gradient, or lazy parameters have no shape yet.
    """
    if any(isinstance(each, nn.UninitializedParameter) for each in model.parameters()):
        raise ConfigurationError(
            f"{type(model).__name__} has parameters without a shape yet: call it once, so that its "
            "lazy modules make them"
        )
    params, _ = find_parameters([model])
    if any(isinstance(param, ShardedParameter) for param in model.parameters()):
        raise UsageError("this model is sharded already; record it before that")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device(device)
    with ExitStack() as stack:
        stack.enter_context(mode)
        stand_ins = stack.enter_context(_stand_ins(model, params, compute_dtype, device))
        tape = Tape(stand_ins)
        stack.enter_context(OpsMode(tape))
        for index, each in enumerate(params):
            stack.callback(_watch_gradient(tape, each.shown, index))
        for path, module in model.named_modules():
            if any(True for _ in module.parameters()) and _runs(module):
                for remove in watch_module(tape, module, clean_name(path)):
                    stack.callback(remove)
        try:
            _step(model, _fake((args, dict(kwargs or {})), device), loss, compute_dtype, tape)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotSupportedError(
                f"{type(model).__name__} decides by values ({error.func}), which a recording has "
                "not; give that part a stand-in whose shapes do not depend on values"
            ) from error
        tape.stop()
    return StepRecording(
        tuple(each.spec for each in params),
        tuple(tape.calls),
        tuple(tape.inputs),
        tuple(tape.blocks),
        tuple(tape.ops),
        tuple(tape.marks),
        None if compute_dtype is None else dtype_name(compute_dtype),
        sum({id(each): each.nbytes for each in model.buffers()}.values()),
    )


def _step(
    model: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    loss: Callable[[Any], Tensor] | None,
    compute_dtype: torch.dtype | None,
    tape: Tape,
) -> None:
    args, kwargs = given
    tape.see_all(given)
    if compute_dtype is not None:
        args, kwargs = map_tensors(
            given, lambda each: each.to(compute_dtype) if each.is_floating_point() else each
        )
    output = model(*args, **kwargs)
    tape.use = MemoryUse.LOGITS_AND_LOSS
    tape.tell_apart(output)
    value = (loss or _default_loss)(output)
    if not value.requires_grad:
        raise ConfigurationError("the loss of the recorded step needs no gradient")
    del output, given, args, kwargs
    value.backward()  # type: ignore[no-untyped-call]
    tape.mark(MarkKind.BACKWARD_OVER, 0)


def _default_loss(output: Any) -> Tensor:
    value = getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    sums = [tensor.sum() for tensor in tensors_in(output, lambda each: each.requires_grad)]
    if not sums:
        raise ConfigurationError("no output of the recorded step needs a gradient")
    return torch.stack([each.float() for each in sums]).sum() if len(sums) > 1 else sums[0]


def _fake(structure: Any, device: torch.device) -> Any:
    def fake(tensor: Tensor) -> Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.requires_grad_(tensor.requires_grad)

    return map_tensors(structure, fake)


@contextmanager
def _stand_ins(
    model: nn.Module,
    params: Sequence[ParamSites],
    compute_dtype: torch.dtype | None,
    device: torch.device,
) -> Iterator[list[Tensor]]:
    """Let modules show parameters and buffers without values."""
    precision = Precision(compute=None if compute_dtype is None else dtype_name(compute_dtype))
    shown: list[Tensor] = []
    kept: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for each in params:
        dtype = dtype_of(precision.full_dtype(each.spec.dtype))
        data = torch.empty(each.spec.shape, dtype=dtype, device=device)
        fake = nn.Parameter(data, requires_grad=each.param.requires_grad)
        each.put(fake)
        shown.append(fake)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stand_in = made.setdefault(id(buffer), _fake(buffer, device))
                kept.append((module._buffers, name, buffer))
                module._buffers[name] = stand_in
                shown.append(stand_in)
    try:
        yield shown
    finally:
        for each in params:
            each.put(each.param)
        for buffers, name, buffer in kept:
            buffers[name] = buffer


def _watch_gradient(tape: Tape, param: Tensor, index: int) -> Callable[[], None]:
    """Give each gradient of ``param`` away as soon as it is there, as the engine does."""
    if not param.requires_grad:
        return lambda: None

    def take(each: Tensor) -> None:
        kind = MarkKind.NO_GRADIENT if each.grad is None else MarkKind.GRADIENT
        tape.mark_backward(kind, index)
        each.grad = None

    handle = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return handle.remove  # type: ignore[no-any-return]


def _runs(module: nn.Module) -> bool:
    """False for containers, which have no forward."""
    return type(module).forward is not nn.Module.forward
