# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on whole matrices, each by the one rank that owns it.

[Note: A twin]
An optimizer such as Muon multiplies matrices, and treats each parameter apart from the others. So
the rank that owns a matrix steps it as one process would, on a plain tensor that shares the memory,
and the others do without: nothing is sent. ``step()`` runs on a twin of the optimizer, which has
these plain tensors in its groups and their state, and when it is done what it changed is handed
back. A parameter has the same plain tensor in every step, for optimizers that remember which is
which. The optimizer of the user has the sharded parameters at all times, also after a step that
fails.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fullshard.core.errors import UsageError
from fullshard.torch.optim.exchange import MatrixExchange
from fullshard.torch.state.apart import plain_step, state_of_all
from fullshard.torch.state.owned import exchanged, place_in, plain_state, shown_state
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter

_ATTRIBUTE = "_fullshard_owned_step"
_OWN = ("param_groups", "state")  # what a twin has for itself


class OwnedStep:
    """The steps of one optimizer on the matrices that ranks own; see [Note: A twin]."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._twin: Optimizer | None = None
        self._pairs: list[tuple[ShardedParameter, nn.Parameter]] = []
        self._stand_ins: dict[tuple[Tensor, bool], nn.Parameter] = {}  # with memory, and without
        self._exchange = MatrixExchange(exchanged(optimizer))
        self._units: list[tuple[ShardedParameter, ...]] = []  # exchanged in this step
        self._receive: Callable[[], dict[ShardedParameter, dict[str, Tensor]]] | None = None
        self._before: _Common | None = None  # for more twins

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OwnedStep":
        """Return that of ``optimizer``, made with the first call."""
        known: OwnedStep | None = optimizer.__dict__.get(_ATTRIBUTE)
        if known is not None:
            return known
        made = optimizer.__dict__[_ATTRIBUTE] = cls(optimizer)
        # Before hooks of users, who may look at the state.
        handle = optimizer.register_step_post_hook(made._finish)
        optimizer._optimizer_step_post_hooks.move_to_end(  # type: ignore[attr-defined]
            handle.id, last=False
        )
        return made

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments to step a twin with; they stay for a step of the twin itself."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if args[0] is self._twin:
            return args, kwargs
        if exchanged(optimizer) and (len(args) > 1 or kwargs):
            raise UsageError(
                "step(closure) makes gradients within the step, before which exchange_matrices "
                "sends them; call backward() first, and step() without arguments"
            )
        self._units = self._exchange.begin()
        if self._units:
            self._receive = self._exchange.send(self._units[0], optimizer.state)
            options = [
                {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
            ]
            self._before = _copied(optimizer.__dict__, state_of_all(optimizer), options)
        moved = {param for unit in self._units for param in unit}
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict, {k: v for k, v in optimizer.state.items() if k not in moved})
        self._pairs = []
        owned = self._received(0, optimizer, twin)
        twin.param_groups = [
            {**group, "params": [self._stand_in(p, twin, owned, moved) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        self._twin = twin
        args, kwargs = (twin, *args[1:]), dict(kwargs)
        if len(args) > 1 and callable(args[1]):
            args = (twin, self._following(args[1]), *args[2:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = self._following(kwargs["closure"])
        return args, kwargs

    def _received(
        self, number: int, optimizer: Optimizer, twin: Optimizer
    ) -> dict[ShardedParameter, nn.Parameter]:
        """Return stand-ins for what this rank owns of a unit; gradients of the next are sent."""
        owned: dict[ShardedParameter, nn.Parameter] = {}
        receive, self._receive = self._receive, None
        if receive is None:
            return owned
        if number + 1 < len(self._units):
            self._receive = self._exchange.send(self._units[number + 1], optimizer.state)
        for param, values in receive().items():
            owned[param] = stand_in = self._standing_for(param, values.pop(""))
            stand_in.grad = values.pop("grad of")
            state = {**optimizer.state.get(param, {}), **values}
            if state:
                twin.state[stand_in] = plain_state(state, param)
            self._pairs.append((param, stand_in))
        return owned

    def _stand_in(
        self,
        param: Any,
        twin: Optimizer,
        owned: Mapping[ShardedParameter, nn.Parameter],
        moved: Container[Tensor],
    ) -> Any:
        """Return the plain tensor that ``twin`` steps; without memory where another rank does."""
        if param in moved:
            return owned[param] if param in owned else self._standing_for(param, None)
        if not isinstance(param, ShardedParameter) or param.ownership.owner is None:
            return param
        if param.ownership.owner != param.ownership.comm.rank:
            twin.state.pop(param, None)
            return self._standing_for(param, None)
        stand_in = self._standing_for(param, param.local.detach().view(_shape(param)))
        if param in twin.state:
            twin.state[stand_in] = plain_state(twin.state.pop(param), param)
        self._pairs.append((param, stand_in))
        _give_grad(param, stand_in)
        return stand_in

    def _standing_for(self, param: Tensor, values: Tensor | None) -> nn.Parameter:
        """Return the plain tensor in the place of ``param``, with ``values``, or without memory."""
        key = param, values is None
        known = self._stand_ins.get(key)
        if values is None:
            values = torch.empty(_shape(param), dtype=param.dtype, device="meta")
        if known is None or (known.dtype, known.device) != (values.dtype, values.device):
            known = self._stand_ins[key] = nn.Parameter(values)
        known.data = values
        known.requires_grad_(param.requires_grad)
        return known

    def _following(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, behind which the twin has the gradients that it has made."""

        def follow() -> Any:
            result = closure()
            for param, stand_in in self._pairs:
                _give_grad(param, stand_in)
            return result

        return follow

    def _finish(self, of: Optimizer, *_: Any) -> None:
        """Hand back what the step has changed beside the parameters."""
        if of is self._twin:
            return
        optimizer, twin, self._twin = self._optimizer(), self._twin, None
        if optimizer is None or twin is None:
            return
        state = twin.state
        stepped = self._collect(optimizer, twin, state)
        moved = {param for unit in self._units for param in unit}
        for param, stand_in in stepped.items():
            if stand_in.grad is not None and param not in moved:
                count_change(param.local)
        self._give_back(optimizer, stepped, state)
        _let_go(stepped.values())
        self._pairs, self._units, self._before = [], [], None
        for group, changed in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group.update({name: value for name, value in changed.items() if name != "params"})
        optimizer.state.clear()
        optimizer.state.update(state)
        changed_attributes = {k: v for k, v in twin.__dict__.items() if k not in _OWN}
        optimizer.__dict__.update(changed_attributes)

    def _collect(
        self, optimizer: Optimizer, twin: Optimizer, state: dict[Any, Any]
    ) -> dict[ShardedParameter, nn.Parameter]:
        """Let ``state`` have what a step has left of each stand-in; return these."""
        for param, stand_in in self._pairs:
            if stand_in in twin.state:
                place = place_in(optimizer, param)
                state[param] = shown_state(twin.state.pop(stand_in), param, place)
        return dict(self._pairs)

    def _give_back(
        self,
        optimizer: Optimizer,
        stepped: Mapping[ShardedParameter, nn.Parameter],
        state: dict[Any, Any],
    ) -> None:
        """Send new values of the first unit, and step the others, one behind the other.

        By a twin for each, made as the first one was, so that what a step counts it counts once.
        """
        finish, earlier = None, stepped
        for number, unit in enumerate(self._units):
            if number:
                earlier, stepped = stepped, self._step_another(number, optimizer, state)
            before, finish = finish, self._exchange.give_back(unit, stepped)
            if before is not None:
                before()
                _let_go(earlier.values())
        if finish is not None:
            finish()
            _let_go(stepped.values())

    def _step_another(
        self, number: int, optimizer: Optimizer, state: dict[Any, Any]
    ) -> dict[ShardedParameter, nn.Parameter]:
        """Step what this rank owns of a unit, beside parameters without memory and gradients."""
        assert self._before is not None
        twin = self._twin = object.__new__(type(optimizer))
        attributes, of_all, options = _copied(*self._before)
        twin.__dict__.update(attributes)
        twin.state = defaultdict(dict, of_all)
        self._pairs = []
        owned = self._received(number, optimizer, twin)
        twin.param_groups = [
            {
                **of_group,
                "params": [
                    owned[p] if p in owned else self._standing_for(p, None) for p in group["params"]
                ],
            }
            for group, of_group in zip(optimizer.param_groups, options, strict=True)
        ]
        plain_step(optimizer)(twin)
        self._twin = None
        return self._collect(optimizer, twin, state)


_Common = tuple[dict[str, Any], dict[Any, Any], list[dict[str, Any]]]
"""What an optimizer has for all parameters: attributes, state, and options of its groups."""


def _copied(
    attributes: Mapping[str, Any], of_all: dict[Any, Any], options: list[dict[str, Any]]
) -> _Common:
    """Return a copy of what a step may change where it is."""
    own = {k: copy.deepcopy(v) if _is_own(v) else v for k, v in attributes.items()}
    return own, copy.deepcopy(of_all), copy.deepcopy(options)


def _is_own(value: Any) -> bool:
    """Return True for a plain tensor, and for a container of numbers and texts."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.is_leaf
    plain = (bool, int, float, str, type(None))
    return all(isinstance(each, plain) for each in tree_leaves(value))


def _let_go(stand_ins: Iterable[nn.Parameter]) -> None:
    """Leave values and gradients, which tensors that are kept would hold until the next step."""
    for each in stand_ins:
        each.grad = None
        each.data = each.data.new_empty(0)


def _shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape in which its owner steps a parameter."""
    return param.ownership.part_shape if isinstance(param, ShardedParameter) else param.shape


def _give_grad(param: ShardedParameter, stand_in: nn.Parameter) -> None:
    grad = param.grad
    plain = grad.local if isinstance(grad, ShardedParameter) else grad
    stand_in.grad = None if plain is None else plain.view(_shape(param))
