# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on whole matrices, each by the one rank that owns it.

[Note: A twin]
An optimizer such as Muon multiplies matrices, and treats each parameter apart from the others. So
the rank that owns a matrix steps it as one process would, on a plain tensor that shares the memory,
and the others do without: nothing is sent. ``step()`` runs on a twin of the optimizer, which has
these plain tensors in its groups and their state, and when it is done what it changed is handed
back. The optimizer of the user has the sharded parameters at all times, also after a step that
fails.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.core.errors import UsageError
from fullshard.torch.optim.exchange import sent
from fullshard.torch.state.forms import in_agreed_order
from fullshard.torch.state.owned import exchanged, is_cut, place_in, plain_state, shown_state
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter

__all__ = ["OwnedStep"]

_ATTRIBUTE = "_fullshard_owned_step"
_OWN = ("param_groups", "state")  # what a twin has for itself


class OwnedStep:
    """The steps of one optimizer on the matrices that ranks own; see [Note: A twin]."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._twin: Optimizer | None = None
        self._pairs: list[tuple[ShardedParameter, nn.Parameter]] = []
        self._moved: dict[ShardedParameter, nn.Parameter] = {}  # by an exchange, on all ranks

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
        """Return the arguments with which the step runs on a twin.

        They stay for a step of the twin itself, as one that calls that of its base class.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        if args[0] is self._twin:
            return args, kwargs
        if exchanged(optimizer) and (len(args) > 1 or kwargs):
            raise UsageError(
                "step(closure) makes gradients within the step, before which exchange_matrices "
                "sends them; call backward() first, and step() without arguments"
            )
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict, optimizer.state)
        self._pairs = []
        self._moved = self._to_owners(optimizer, twin)
        twin.param_groups = [
            {**group, "params": [self._stand_in(param, twin) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        self._twin = twin
        args, kwargs = (twin, *args[1:]), dict(kwargs)
        if len(args) > 1 and callable(args[1]):
            args = (twin, self._following(args[1]), *args[2:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = self._following(kwargs["closure"])
        return args, kwargs

    def _to_owners(
        self, optimizer: Optimizer, twin: Optimizer
    ) -> dict[ShardedParameter, nn.Parameter]:
        """Move what has gradients to its owners, see [Note: An exchange]; return stand-ins."""
        places = exchanged(optimizer)
        params = [p for p in in_agreed_order({p: p for p in places}).values() if p.grad is not None]
        moves, kinds = [], []
        for param in params:
            place, state = places[param], twin.state.get(param, {})
            grad = param.grad.local if isinstance(param.grad, ShardedParameter) else param.grad
            cut = {name: each.local for name, each in state.items() if is_cut(each, place)}
            for name, local in {"": param.local.detach(), "grad of": grad, **cut}.items():
                held = state[name].ownership if name in cut else param.ownership
                moves.append((param, local, held, place))
                kinds.append((param, name))
        values = dict(zip(kinds, sent(moves, "values and gradients"), strict=True))
        moved = {}
        for param in params:
            if places[param].owner != param.ownership.comm.rank:
                twin.state.pop(param, None)
                moved[param] = nn.Parameter(torch.empty_like(_meta(param)), param.requires_grad)
                continue
            whole = {n: v.view(param.shape) for (p, n), v in values.items() if p is param}
            moved[param] = nn.Parameter(whole.pop(""), param.requires_grad)
            moved[param].grad = whole.pop("grad of")
            if param in twin.state:
                state = {**twin.state.pop(param), **whole}
                twin.state[moved[param]] = plain_state(state, param)
            self._pairs.append((param, moved[param]))
        return moved

    def _stand_in(self, param: Any, twin: Optimizer) -> Any:
        """Return the plain tensor that ``twin`` steps; without memory where another rank does."""
        if param in self._moved:
            return self._moved[param]
        if not isinstance(param, ShardedParameter) or param.ownership.owner is None:
            return param
        if param.ownership.owner != param.ownership.comm.rank:
            twin.state.pop(param, None)
            return nn.Parameter(torch.empty_like(_meta(param)), param.requires_grad)
        stand_in = nn.Parameter(param.local.view(param.shape), param.requires_grad)
        if param in twin.state:
            twin.state[stand_in] = plain_state(twin.state.pop(param), param)
        self._pairs.append((param, stand_in))
        _give_grad(param, stand_in)
        return stand_in

    def _following(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, behind which the twin has the gradients that it has made."""

        def follow() -> Any:
            result = closure()
            for param, stand_in in self._pairs:
                _give_grad(param, stand_in)
            return result

        return follow

    def _finish(self, stepped: Optimizer, *_: Any) -> None:
        """Hand back what the step has changed beside the parameters."""
        if stepped is self._twin:
            return
        optimizer, twin, self._twin = self._optimizer(), self._twin, None
        if optimizer is None or twin is None:
            return
        for param, stand_in in self._pairs:
            if stand_in in twin.state:
                place = place_in(optimizer, param)
                twin.state[param] = shown_state(twin.state.pop(stand_in), param, place)
            if stand_in.grad is not None and param not in self._moved:
                count_change(param.local)
        self._from_owners(optimizer)
        self._pairs, self._moved = [], {}
        for group, changed in zip(optimizer.param_groups, twin.param_groups, strict=True):
            group.update({name: value for name, value in changed.items() if name != "params"})
        optimizer.state.clear()
        optimizer.state.update(twin.state)
        changed_attributes = {k: v for k, v in twin.__dict__.items() if k not in _OWN}
        optimizer.__dict__.update(changed_attributes)

    def _from_owners(self, optimizer: Optimizer) -> None:
        """Let all ranks have their parts of what owners have stepped."""
        moves = []
        for param, stand_in in self._moved.items():
            value = param.local.new_empty(0) if stand_in.is_meta else stand_in.detach()
            moves.append((param, value, place_in(optimizer, param), param.ownership))
        for (param, *_), value in zip(moves, sent(moves, "new values"), strict=True):
            param.local.detach().copy_(value.view(param.local.shape))
            count_change(param.local)


def _meta(param: ShardedParameter) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _give_grad(param: ShardedParameter, stand_in: nn.Parameter) -> None:
    grad = param.grad
    plain = grad.local if isinstance(grad, ShardedParameter) else grad
    stand_in.grad = None if plain is None else plain.view(param.shape)
