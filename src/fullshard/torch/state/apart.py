# SPDX-License-Identifier: Apache-2.0
"""The trial that tells if an optimizer steps each matrix apart from the others.

[Note: A trial]
Matrices with one owner each are stepped rightly by optimizers that look at one at a time, and
wrongly by those that look at all (that clip by one norm, or estimate one step size). No list of
names says which is which: classes of one name differ between libraries and with their options. So
an optimizer is tried before it steps owned matrices the first time. Its class, with its options,
steps a few small matrices, two of one shape: once all together, and once each by itself beside
others that have neither memory nor gradients, as it is with owners. Gradients are large and small
in turn, so that clipping shows, and agree on the way down, so that estimates of a step size grow.
Unless all values are equal to the last bit, and what it keeps for all of them, it is not used on
owned matrices. A trial takes some milliseconds, sends nothing, and changes nothing of the
optimizer.

[Note: A trial of stacks]
Of a stack of matrices, as experts on an axis of their own, an owner has some, and others are on
ranks that it does not know. So a stack is tried, too: whole, and in two parts. What the optimizer
keeps of it must be of its shape or a number, since state of any other shape has no place in the
whole.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.torch.tensor.parameter import ShardedParameter

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop),
    }
)
"""Classes of optimizers whose step is known to treat every element by itself."""

_SHAPES = ((48, 64), (61, 48), (61, 48))
_STACK = (3, 48, 64)
_SCALES = (1.0, 100.0, 0.01)  # of gradients, in turn
_STEPS = 12
_MOST_GROUPS = 8
_LR = 0.1
_VERDICT = "_fullshard_looks_beyond"
_NOT_TRIED = ("param_groups", "state")

_lock = threading.Lock()  # around random numbers, which ranks that are threads share


class _LooksBeyondError(Exception):
    """The reason, in words."""


class _Silent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to send anything."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise _LooksBeyondError(f"it communicates in its step ({func})")
        return func(*args, **(kwargs or {}))


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Return True for these, and for a class derived from one that steps as that does.

    Of one with a step of its own nobody knows what it does.
    """
    ways = _ways(kind)
    return any(issubclass(kind, each) and ways == _ways(each) for each in ELEMENTWISE)


def _ways(kind: Any) -> tuple[Callable[..., Any], ...]:
    """Return the methods that step, without the hooks that torch puts around them."""
    step = kind.step.__wrapped__ if hasattr(kind.step, "hooked") else kind.step
    return step, getattr(kind, "_init_group", step)


def steps_apart(optimizer: Optimizer) -> bool:
    """Return True if owners step whole matrices; torch's elementwise ones have no need to."""
    return not is_elementwise(type(optimizer)) and looks_beyond(optimizer) is None


def looks_beyond(optimizer: Optimizer) -> str | None:
    """Return why ``optimizer`` must not step matrices that have owners; None if it may.

    See [Note: A trial]. Its answer is kept until the optimizer has more groups, or stacks.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    of = len(optimizer.param_groups), any(map(_is_part_of_stack, params))
    known: tuple[tuple[int, bool], str | None] | None = optimizer.__dict__.get(_VERDICT)
    if known is not None and known[0] == of:
        return known[1]
    try:
        if isinstance(optimizer, optim.LBFGS):  # its step cannot be tried: it wants a closure
            raise _LooksBeyondError("it takes dot products over all parameters together")
        with _lock:
            reason = _try(optimizer) or (_try_stack(optimizer) if of[1] else None)
    except _LooksBeyondError as error:
        reason = str(error)
    except Exception as error:  # whatever its step raises
        reason = f"tried on small matrices it raises {type(error).__name__}: {error}"
    optimizer.__dict__[_VERDICT] = (of, reason)
    return reason


def _is_part_of_stack(param: Tensor) -> bool:
    place = param.ownership if isinstance(param, ShardedParameter) else None
    return place is not None and place.tensor_parallel is not None and place.owner is not None


def _chosen(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of groups that differ."""
    groups = (_options(group) for group in optimizer.param_groups if group["params"])
    return list({repr(group): group for group in groups}.values())[:_MOST_GROUPS]


def _drawn(
    optimizer: Optimizer, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return tensors to step, and gradients of each for each step."""
    device = next(p for group in optimizer.param_groups for p in group["params"]).device
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn() -> list[Tensor]:
        return [
            torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes
        ]

    start, downhill = drawn(), drawn()
    grads = [  # of different size, so that what is common of all is not what one alone has
        [
            scale * 10 ** (number % 2) * (common + noise)
            for number, (common, noise) in enumerate(zip(downhill, drawn(), strict=True))
        ]
        for scale in islice(cycle(_SCALES), _STEPS)
    ]
    return start, grads


def _try(optimizer: Optimizer) -> str | None:
    chosen = _chosen(optimizer)
    start, grads = _drawn(optimizer, _SHAPES * len(chosen))
    together, of_all = _stepped(optimizer, chosen, start, grads, range(len(start)))
    if any(torch.equal(before, after) for before, after in zip(start, together, strict=True)):
        return "tried on small matrices it leaves them as they are"
    if not all(bool(torch.isfinite(each).all()) for each in together):
        return "tried on small matrices it makes no finite numbers of them"
    for number, expected in enumerate(together):
        group = number // len(_SHAPES)
        (alone,), of_one = _stepped(optimizer, chosen, start, grads, [number])
        if not torch.equal(alone, expected):
            return "tried on small matrices it steps one in another way if there are others"
        if not _same(_common(of_one, group), _common(of_all, group)):
            return "tried on small matrices it keeps other numbers for all if there are others"
    return None


def _try_stack(optimizer: Optimizer) -> str | None:
    """See [Note: A trial of stacks]."""
    chosen = _chosen(optimizer)
    start, grads = _drawn(optimizer, [_STACK] * len(_SHAPES) * len(chosen))
    for of_step in grads:
        for grad in of_step:
            grad *= torch.tensor([1.0, 10.0, 0.1], device=grad.device).view(-1, 1, 1)
    numbers = range(len(start))
    whole, of_all = _stepped(optimizer, chosen, start, grads, numbers)
    for value in tree_leaves([of_all.state[p] for g in of_all.param_groups for p in g["params"]]):
        if (
            isinstance(value, Tensor)
            and value.numel() > 1
            and (type(value) is not Tensor or value.shape != _STACK)
        ):
            return (
                f"of a stack of matrices {_STACK} it keeps a {type(value).__name__} "
                f"{tuple(value.shape)}, which has no place in that of experts of other ranks"
            )
    for part in (slice(1), slice(1, None)):
        of_part = [[grad[part] for grad in of_step] for of_step in grads]
        alone, _ = _stepped(optimizer, chosen, [each[part] for each in start], of_part, numbers)
        if not all(map(torch.equal, alone, (each[part] for each in whole))):
            return (
                "tried on a small stack of matrices it steps each in another way if all are there"
            )
    return None


def _common(twin: Optimizer, number: int) -> list[Any]:
    """Return what an optimizer keeps for all parameters, or all of a group."""
    group = {name: value for name, value in twin.param_groups[number].items() if name != "params"}
    found = [*tree_leaves([group, state_of_all(twin)]), *twin.__dict__.values()]
    return [each for each in found if isinstance(each, bool | int | float | Tensor)]


def state_of_all(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, as a count of steps."""
    return {key: each for key, each in optimizer.state.items() if not isinstance(key, Tensor)}


def _same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.shape == other.shape and torch.equal(one, other)
        return bool(one == other or (one != one and other != other))

    return len(ones) == len(others) and all(map(same, ones, others))


def plain_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the ``step`` of the class, without the hooks around it."""
    step: Callable[..., Any] = type(optimizer).step
    return getattr(step, "__wrapped__", step)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what a group has beside parameters, with a step that shows in any dtype."""
    options = {k: copy.deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
    if isinstance(options.get("lr"), Tensor):
        options["lr"].fill_(_LR)
    elif options.get("lr") is not None:
        options["lr"] = _LR
    return options


def _stepped(
    optimizer: Optimizer,
    groups: Sequence[dict[str, Any]],
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    stepped: Sequence[int],
) -> tuple[list[Tensor], Optimizer]:
    """Return the ``stepped`` matrices, beside others without gradients, and what did it."""
    params = [
        nn.Parameter(each.clone() if number in stepped else torch.empty_like(each, device="meta"))
        for number, each in enumerate(start)
    ]
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = type(value)()
        elif name not in _NOT_TRIED and not name.startswith("_fullshard"):
            twin.__dict__[name] = copy.deepcopy(value, memo)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**copy.deepcopy(group), "params": params[number * len(_SHAPES) :][: len(_SHAPES)]}
        for number, group in enumerate(groups)
    ]
    step = plain_step(optimizer)
    device = start[0].device
    devices = [] if device.type == "cpu" else [device]
    with (
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        torch.compiler.set_stance("force_eager"),
        _Silent(),  # type: ignore[no-untyped-call]
    ):
        torch.manual_seed(0)
        numbers = _random_state(devices)
        for of_step in grads:
            for number in stepped:
                params[number].grad = of_step[number].clone()
            step(twin)
        if not all(map(torch.equal, numbers, _random_state(devices))):
            raise _LooksBeyondError("it draws random numbers, others than one process would")
    return [params[number].detach() for number in stepped], twin


def _random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    of_devices = (torch.get_device_module(each).get_rng_state(each) for each in devices)
    return [torch.get_rng_state(), *of_devices]
