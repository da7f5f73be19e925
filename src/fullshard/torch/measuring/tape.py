# SPDX-License-Identifier: Apache-2.0
"""Marks of a step as they come: memory by storages, operations, calls of modules, gradients.

[Note: Workspaces]
oneDNN convolves in a blocked layout, channels in vectors: inputs, weights and outputs of another
layout are copied into it and back. Fake tensors do not see that. The rules are those of torch 2.13,
as the profiler's record of the allocator has shown them.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fullshard.plan.measured.recording import (
    MarkKind,
    MemoryUse,
    RecordedCall,
    RecordedOp,
    StepMark,
    WatchedInput,
)
from fullshard.torch.step.checkpoints import is_recomputation
from fullshard.torch.step.structures import (
    hook_outputs,
    map_tensors,
    tensors_in,
    tensors_with_gradients,
)


def workspace_bytes(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    """Bytes that ``func`` holds beside ``outputs`` while a CPU runs it; see [Note: Workspaces]."""
    rule = _RULES.get(func._overloadpacket.__name__)
    if rule is None or not outputs or outputs[0].device.type != "cpu":
        return 0
    return rule(args, outputs)


def _convolution(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    given, weight, output = args[0], args[1], outputs[0]
    if _is_blocked(given):
        return 0
    blocked = _blocked_bytes(output)
    taken = 0 if _channels(given) < _LANES else _blocked_bytes(given) + _size(weight)
    return max(taken + blocked - _size(output), blocked)


def _convolution_backward(args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    grad, given = args[0], args[1]
    if _is_blocked(given):
        return 0
    copied = 0 if grad.is_contiguous() else _size(grad)
    for_weights = _blocked_bytes(grad, narrow=True) + _blocked_bytes(given, narrow=True)
    for_inputs = _blocked_bytes(grad) + _blocked_bytes(given) - _size(given)
    return copied + max(for_weights, for_inputs)


def _batch_norm_backward(args: Sequence[Any], _outputs: Sequence[Tensor]) -> int:
    return _size(args[1]) if args[0].is_contiguous() else 0


_RULES: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "native_batch_norm_backward": _batch_norm_backward,
}


def _is_blocked(tensor: Tensor) -> bool:
    """True if oneDNN takes the tensor as it is."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


_LANES = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8


def _channels(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.dim() > 1 else 1


def _blocked_bytes(tensor: Tensor, *, narrow: bool = False) -> int:
    """The size of a copy whose channels fill whole vectors; ``narrow`` ones if they are few."""
    channels = _channels(tensor)
    lanes = 8 if narrow and channels <= 8 else _LANES
    return _size(tensor) * (-(-channels // lanes) * lanes) // max(1, channels)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_WATCHED = "_fullshard_measured"


class Tape:
    """Collects marks. Storages in ``known`` (parameters, buffers) are not counted as memory."""

    def __init__(self, known: Sequence[Tensor]):
        self.marks: list[StepMark] = []
        self.calls: list[RecordedCall] = []
        self.inputs: list[WatchedInput] = []
        self.blocks: list[tuple[int, MemoryUse]] = []
        self.ops: list[RecordedOp] = []
        self.use = MemoryUse.ACTIVATIONS
        self.running: list[CallToken] = []
        self.last_begun = ""
        self._tasks: dict[int, int] = {}  # autograd's graph tasks, in the order in which they began
        self._task = 0
        self._references: dict[int, weakref.ref[Any] | None] = {}
        self._numbers: dict[int, int] = {}
        self._on = True
        for tensor in known:
            self._references[tensor.untyped_storage()._cdata] = None

    def mark(self, kind: MarkKind, number: int = -1) -> None:
        """Note that something happened."""
        if self._on:
            self.marks.append(StepMark(kind, number))

    def mark_backward(self, kind: MarkKind, number: int) -> None:
        """Note that something happened in a backward, and in which graph task if it is another."""
        task = self._tasks.setdefault(torch._C._current_graph_task_id(), len(self._tasks))
        if task != self._task:
            self._task = task
            self.mark(MarkKind.TASK, task)
        self.mark(kind, number)

    def stop(self) -> None:
        """Take no more notes: what is still there is there when the step is over."""
        self._on = False

    def sees(self, tensor: Tensor) -> None:
        """Note the memory of ``tensor`` if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references:
            return
        number = self._numbers[key] = len(self.blocks)
        self.blocks.append((storage.nbytes(), self.use))

        def release(_reference: object) -> None:
            self._references.pop(key, None)
            self._numbers.pop(key, None)
            self.mark(MarkKind.RELEASE, number)

        self._references[key] = weakref.ref(storage, release)
        self.mark(MarkKind.ALLOCATE, number)

    def holds_for_a_moment(self, size: int) -> None:
        """Note memory that is gone again when the operation is over."""
        if size:
            self.blocks.append((size, self.use))
            self.mark(MarkKind.ALLOCATE, len(self.blocks) - 1)
            self.mark(MarkKind.RELEASE, len(self.blocks) - 1)

    def see_all(self, structure: Any) -> None:
        """Note the memory of all tensors in ``structure``."""
        for tensor in tensors_in(structure, _is_any):
            self.sees(tensor)

    def tell_apart(self, structure: Any) -> None:
        """Count the memory of the tensors in ``structure`` as that of logits."""
        for tensor in tensors_in(structure, _is_any):
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.blocks[number] = self.blocks[number][0], MemoryUse.LOGITS_AND_LOSS


class OpsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation, forward and backward, and the memory of what it returns."""

    def __init__(self, tape: Tape):
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``; note what it was."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        for tensor in given:
            self._tape.sees(tensor)
        if not func.is_view and given:
            self._note(func, args, kwargs, output, given)
            self._tape.holds_for_a_moment(workspace_bytes(func, args, given))
        return output

    def _note(self, func: Any, args: Any, kwargs: Any, output: Any, given: list[Tensor]) -> None:
        tape = self._tape
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=output) if count is not None else 0
        moved = sum(each.numel() * each.element_size() for each in [*taken, *given])
        module = tape.running[-1].module if tape.running else tape.last_begun
        tape.ops.append(RecordedOp(func._overloadpacket.__name__, module, float(flops), moved))
        tape.mark(MarkKind.OP, len(tape.ops) - 1)


class CallToken:
    """One call of a module while autograd's graph of it exists."""

    def __init__(self, tape: Tape, module: str):
        self.module = module
        self.number: int = len(tape.calls)
        self._outermost = not tape.running
        self._tape = tape
        self._first_node = torch._C._autograd._get_sequence_nr()
        self._begun = False
        self.counts: bool = torch.is_grad_enabled() and not is_recomputation()
        tape.calls.append(RecordedCall(module, False, self.counts))
        gone = weakref.finalize(self, tape.mark, MarkKind.OUTPUTS_GONE, self.number)
        gone.atexit = False

    def watch_inputs(self, given: Any) -> Any:
        """Hear when the gradients of the inputs are there; returns inputs to go on with.

        An input that other calls watch already is replaced by a view: its own gradient is complete
        only when all of them are over.
        """
        views: dict[int, Tensor] = {}  # what was one tensor stays one

        def watched(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or id(tensor) in views:
                return views.get(id(tensor), tensor)
            source = tensor.__dict__.get(_WATCHED, -1)
            own = tensor if source < 0 else tensor.view_as(tensor)
            views[id(tensor)] = views[id(own)] = own
            number = len(self._tape.inputs)
            self._tape.inputs.append(WatchedInput(self.number, source, own.is_leaf))
            setattr(own, _WATCHED, number)
            hook = partial(self._tape.mark_backward, MarkKind.INPUT_GRADIENT, number)
            own.register_hook(lambda _: hook())  # type: ignore[no-untyped-call]
            if not own.is_leaf:
                gone = weakref.finalize(hook, self._tape.mark, MarkKind.INPUT_GONE, number)
                gone.atexit = False
            return own

        return map_tensors(given, watched)

    def watch_outputs(self, given: Any) -> None:
        """Hear when the first gradient of the outputs is there."""
        outputs = tensors_with_gradients(given)
        if outputs:
            self._tape.calls[self.number] = replace(self._tape.calls[self.number], leads_back=True)
        hook_outputs(outputs, self._first_node, self._on_output_gradient)

    def _on_output_gradient(self, _grads: object) -> None:
        if not self._begun:
            self._begun = True
            if not self._outermost:
                self._tape.use = MemoryUse.ACTIVATIONS
            self._tape.last_begun = self.module
        self._tape.mark_backward(MarkKind.OUTPUT_GRADIENT, self.number)


def watch_module(tape: Tape, module: nn.Module, path: str) -> list[Callable[[], None]]:
    """Let ``tape`` hear of the calls of ``module``; returns what removes the hooks."""
    tokens: list[CallToken] = []

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        token = CallToken(tape, path)
        tape.mark(MarkKind.FORWARD_BEGIN, token.number)
        tokens.append(token)
        tape.running.append(token)
        return token.watch_inputs((args, kwargs)) if token.counts else None

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        token = tokens.pop()
        while tape.running.pop() is not token:
            pass
        if token.counts:
            token.watch_outputs(output)
        tape.mark(MarkKind.FORWARD_END, token.number)

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
    return [handle.remove for handle in handles]


def _is_any(_tensor: Tensor) -> bool:
    return True
