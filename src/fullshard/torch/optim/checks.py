# SPDX-License-Identifier: Apache-2.0
"""Checks of optimizers over sharded parameters, and the bytes of their state.

[Note: Looking at optimizers]
An optimizer that was created before the model was sharded holds parameters that nothing uses any
more: it would silently train nothing. And an optimizer that needs whole tensors must not see spans.
So from the first sharding on, every optimizer is looked at when it steps: once, and again when it
has more parameters or more parameters have been sharded since.
"""

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.torch.optim.exchange import CHECKED
from fullshard.torch.optim.merged_step import MergedStep
from fullshard.torch.optim.owned_step import OwnedStep
from fullshard.torch.state.apart import looks_beyond, steps_apart
from fullshard.torch.state.optimizers import refuse_state_of_another, shard_state, translate
from fullshard.torch.state.owned import place_in
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.unit.guards.optimizer_steps import count_step
from fullshard.torch.unit.guards.replaced import last_replacement, name_of_replacement

NEEDS_WHOLE_TENSORS = {
    *("AdaFactor", "Adafactor", "DistributedShampoo", "KFAC", "LAMB", "LARS", "LBFGS", "Lamb"),
    *("Muon", "SOAP", "Shampoo"),
}
"""Classes of optimizers, by name, that use rows, matrices or norms of whole parameters. Others of
their kind are stopped by the operations that they call on a `ShardedParameter`."""

_EAGER = "_fullshard_steps_eagerly"
_COMMS = "_fullshard_comms"  # that share its parameters
_OWNED = "_fullshard_owned"  # it steps matrices that one rank has whole
_EMPTY = "_fullshard_empty"  # those of its parameters of which this rank has nothing

_watching = False
_lock = threading.Lock()


def watch_optimizers() -> None:
    """Look at every optimizer before it steps, from now on. See [Note: Looking at optimizers]."""
    global _watching
    with _lock:
        if not _watching:
            # A compiled step is left by this hook, before anything of it is traced.
            before = torch.compiler.disable(_before_step)  # type: ignore[no-untyped-call]
            register_optimizer_step_pre_hook(before)
            _watching = True


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    look_at(optimizer)
    if not getattr(optimizer, _OWNED):
        return None
    return OwnedStep.of(optimizer).begin(args, kwargs)


def look_at(optimizer: Optimizer) -> None:
    """Raise, before anything has changed, if ``optimizer`` cannot work on what it holds.

    Otherwise make it ready for sharded parameters. See [Note: Looking at optimizers].
    """
    groups = optimizer.param_groups
    seen = (last_replacement(), sum(len(group["params"]) for group in groups))
    if getattr(optimizer, CHECKED, None) == seen:
        _count(optimizer)
        return
    kind = type(optimizer).__name__
    params = [param for group in groups for param in group["params"]]
    for param in params:
        name = name_of_replacement(param)
        if name is not None:
            raise UsageError(
                f"{kind} was created before the model was sharded: its parameter {name!r} has been "
                "replaced, and stepping would train nothing. Create the optimizer afterwards, "
                "from the sharded model's parameters()"
            )
    held = [param for param in params if isinstance(param, ShardedParameter)]
    # The first that is cut by element, if there is one.
    sharded = next(iter(sorted(held, key=lambda each: isinstance(each, DTensor))), None)
    owned = [each for each in held if place_in(optimizer, each).owner is not None]
    apart = bool(owned) and steps_apart(optimizer)
    cut = [each for each in held if not isinstance(each, DTensor)]
    if apart:
        cut = [each for each in cut if place_in(optimizer, each).owner is None]
    _refuse_parts(optimizer, cut)
    if sharded is not None:
        _check_low_bit(optimizer, cut)
        refuse_state_of_another(optimizer, optimizer.state.values())
        translate(optimizer)
        shard_state(optimizer)
        MergedStep.of(optimizer)
        _leave_uncompiled(inspect.unwrap(type(optimizer).step))
    setattr(optimizer, _COMMS, list(dict.fromkeys(each.ownership.comm for each in held)))
    setattr(optimizer, _EMPTY, [each for each in held if each.span.numel == 0])
    setattr(optimizer, _OWNED, apart)
    setattr(optimizer, CHECKED, seen)
    _count(optimizer)


def _refuse_parts(optimizer: Optimizer, cut: list[ShardedParameter]) -> None:
    """Raise if ``optimizer`` needs whole tensors, and is to step parts of some."""
    kind = type(optimizer).__name__
    names = {cls.__name__ for cls in type(optimizer).__mro__} & NEEDS_WHOLE_TENSORS
    if not names or not cut:
        return
    owner, reason = cut[0].ownership.owner, looks_beyond(optimizer)
    is_where = "sharded by element" if owner is None else f"on rank {owner} alone"
    raise NotSupportedError(
        f"{kind} needs whole tensors ({', '.join(sorted(names))}), but "
        f"{cut[0].ownership.name!r} is {is_where}"
        + (
            f", and {reason}. Use"
            if reason
            else '. Use align="matrix", which leaves matrices whole, exchange_matrices(optimizer),'
        )
        + " an elementwise optimizer (SGD, Adam, AdamW, Adagrad, RMSprop, ...), or leave these "
        "parameters out of sharding"
    )


def _check_low_bit(optimizer: Optimizer, cut: list[ShardedParameter]) -> None:
    """Refuse what torchao's optimizers with low-bit state cannot do, and step them eagerly."""
    kind = type(optimizer)
    if not any(cls.__module__.startswith("torchao.optim") for cls in kind.__mro__):
        return
    if cut:
        raise NotSupportedError(
            f"{kind.__name__} keeps its state in blocks of rows, but {cut[0].ownership.name!r} is "
            "sharded by element: use fully_shard, or an elementwise optimizer"
        )
    if any(
        isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"]
    ):
        _step_eagerly(optimizer)


def _step_eagerly(optimizer: Optimizer) -> None:
    """Run the compiled parts of the optimizer's steps as they are written, from this step on.

    torch.compile cannot trace sharded parameters outside forward. After a step that fails compiled
    code of others runs eagerly, too, until the next step has ended.
    """
    if getattr(optimizer, _EAGER, False):
        return
    setattr(optimizer, _EAGER, True)
    entered: list[Any] = []

    def enter(*_: Any) -> None:
        if not entered:
            entered.append(torch.compiler.set_stance("force_eager"))
            entered[0].__enter__()

    def leave(*_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)


def _leave_uncompiled(step: Callable[..., Any]) -> None:
    """Let torch.compile run ``step``, and what it calls, as it is written.

    Steps over sharded parameters cannot be traced. What a step calls in compiled form stays so.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(step.__code__, eval_frame._FrameExecStrategy(skip, skip))


def _count(optimizer: Optimizer) -> None:
    """Count a step, on this rank and on the shards of which it writes nothing.

    A rank without elements of a unit must see, as the others do, that its parameters have changed:
    what is gathered anew follows from that.
    """
    count_step(getattr(optimizer, _COMMS))
    empty = [each for each in getattr(optimizer, _EMPTY) if each.grad is not None]
    # Steps that are put off have been counted, and whoever takes ``local`` waits for them.
    count_change(*(vars(each)["local"] for each in empty if "local" in vars(each)))


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of ``optimizer``'s state on this rank: spans, and plain tensors whole."""
    values = tree_leaves(list(optimizer.state.values()))
    return sum(held_bytes(value) for value in values if isinstance(value, Tensor))


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes of ``tensor`` on this rank: of its span, or of a plain one."""
    held = tensor.local if isinstance(tensor, ShardedParameter) else tensor
    return held.numel() * held.element_size()
