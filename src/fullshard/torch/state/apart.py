# SPDX-License-Identifier: Apache-2.0
"""The trial that tells if an optimizer steps each matrix apart from the others.

[Note: A trial]
Matrices with one owner each are stepped rightly by optimizers that look at one at a time, and
wrongly by those that look at all (that clip by one norm, or estimate one step size). No list of
names says which is which: classes of one name differ between libraries and with their options. So
an optimizer is tried before it steps owned matrices the first time. Its class, with its options,
steps a few small matrices: once all together, and once each by itself beside others that have
neither memory nor gradients, as it is with owners. Gradients are large and small in turn, so that
clipping shows. Unless all values are equal to the last bit it is not used on owned matrices. A
trial takes some milliseconds, sends nothing, and changes nothing of the optimizer.
"""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ELEMENTWISE", "looks_beyond", "plain_step", "steps_apart"]

ELEMENTWISE = frozenset(
    {SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, ASGD, Rprop}
)
"""Classes of optimizers whose step is known to treat every element by itself. Classes derived from
them are not meant: nobody knows what they do."""

_SHAPES = ((48, 64), (64, 48))
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


def steps_apart(optimizer: Optimizer) -> bool:
    """Return True if ``optimizer`` has owners step the matrices that they have whole.

    Elementwise optimizers of torch have no need to: they step spans, whatever these are of.
    """
    return type(optimizer) not in ELEMENTWISE and looks_beyond(optimizer) is None


def looks_beyond(optimizer: Optimizer) -> str | None:
    """Return why ``optimizer`` must not step matrices that have owners; None if it may.

    See [Note: A trial]. Its answer is kept until the optimizer has more groups.
    """
    count = len(optimizer.param_groups)
    known: tuple[int, str | None] | None = optimizer.__dict__.get(_VERDICT)
    if known is not None and known[0] == count:
        return known[1]
    try:
        if isinstance(optimizer, LBFGS):  # its step cannot be tried: it wants a closure
            raise _LooksBeyondError("it takes dot products over all parameters together")
        with _lock:
            reason = _try(optimizer)
    except _LooksBeyondError as error:
        reason = str(error)
    except Exception as error:  # whatever its step raises
        reason = f"tried on small matrices it raises {type(error).__name__}: {error}"
    optimizer.__dict__[_VERDICT] = (count, reason)
    return reason


def _try(optimizer: Optimizer) -> str | None:
    groups = {repr(_options(group)): group for group in optimizer.param_groups if group["params"]}
    chosen = [_options(group) for group in list(groups.values())[:_MOST_GROUPS]]
    device = next(iter(groups.values()))["params"][0].device
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        shapes = _SHAPES * len(chosen)
        return [torch.randn(shape, generator=generator).to(device) for shape in shapes]

    start = drawn()
    grads = [  # of different size, so that what is common of all is not what one alone has
        [scale * 10 ** (number % 2) * grad for number, grad in enumerate(drawn())]
        for scale in islice(cycle(_SCALES), _STEPS)
    ]
    together = _stepped(optimizer, chosen, start, grads, range(len(start)))
    if any(torch.equal(before, after) for before, after in zip(start, together, strict=True)):
        return "tried on small matrices it leaves them as they are"
    if not all(bool(torch.isfinite(each).all()) for each in together):
        return "tried on small matrices it makes no finite numbers of them"
    for number, expected in enumerate(together):
        (alone,) = _stepped(optimizer, chosen, start, grads, [number])
        if not torch.equal(alone, expected):
            return "tried on small matrices it steps one in another way if there are others"
    return None


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
) -> list[Tensor]:
    """Return the matrices that are ``stepped``, after steps beside others without gradients."""
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
        {**copy.deepcopy(group), "params": params[2 * number : 2 * number + 2]}
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
    return [params[number].detach() for number in stepped]


def _random_state(devices: Sequence[torch.device]) -> list[Tensor]:
    of_devices = (torch.get_device_module(each).get_rng_state(each) for each in devices)
    return [torch.get_rng_state(), *of_devices]
