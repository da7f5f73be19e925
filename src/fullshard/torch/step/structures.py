# SPDX-License-Identifier: Apache-2.0
"""Find and replace the tensors in nested arguments and outputs of modules."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

_requires_grad, _leads_back = attrgetter("requires_grad"), attrgetter("grad_fn")
WATCHED = "_fullshard_watched"
"""The attribute that marks a tensor of which some call of a unit awaits the gradient."""


def tensors_in(structure: Any, keep: Callable[[Tensor], bool]) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses for which ``keep`` holds."""
    if isinstance(structure, Tensor):
        if keep(structure):
            yield structure
    elif isinstance(structure, (tuple, list)):
        for item in structure:
            yield from tensors_in(item, keep)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item, keep)
    elif dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        for spec in dataclasses.fields(structure):
            yield from tensors_in(getattr(structure, spec.name), keep)


AttributePlace = tuple[dict[str, Any], str]
"""The attributes of a module, and the name of one."""


def attributes_with_gradients(
    module: nn.Module, leave_out: Callable[[nn.Module], bool]
) -> list[AttributePlace]:
    """The attributes of ``module`` and modules below it in which forward has left tensors.

    Only those that autograd can go back from; ``leave_out`` ends the search below a module.
    """
    found: list[AttributePlace] = []
    for name, value in module.__dict__.items():
        may_hold = name not in _REGISTRIES and isinstance(value, (Tensor, list, tuple, dict))
        if may_hold and any(True for _ in tensors_in(value, _leads_back)):
            found.append((module.__dict__, name))
    for child in module.children():
        if not leave_out(child):
            found += attributes_with_gradients(child, leave_out)
    return found


_REGISTRIES = set(nn.Module().__dict__)  # of parameters, modules, hooks


def tensors_with_gradients(structure: Any) -> list[Tensor]:
    """The tensors in ``structure`` that require gradients."""
    if isinstance(structure, Tensor):  # as most outputs are
        return [structure] if structure.requires_grad else []
    return list(tensors_in(structure, _requires_grad))


def outputs_with_gradients(structure: Any) -> tuple[list[Tensor], bool]:
    """The tensors in an output that require gradients; and whether it may hide further tensors."""
    return tensors_with_gradients(structure), holds_unknown(structure)


def map_tensors(structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """``structure`` with every tensor replaced that ``change`` changes; itself if none was."""
    if isinstance(structure, Tensor):
        return change(structure)
    if isinstance(structure, (tuple, list)):
        items = [map_tensors(item, change) for item in structure]
        if all(new is old for new, old in zip(items, structure, strict=True)):
            return structure
        if hasattr(structure, "_fields"):  # a named tuple
            return type(structure)(*items)
        return type(structure)(items)
    if isinstance(structure, dict):
        values = {key: map_tensors(value, change) for key, value in structure.items()}
        if all(values[key] is structure[key] for key in structure):
            return structure
        changed = copy.copy(structure)
        for key, value in values.items():
            changed[key] = value
        return changed
    if dataclasses.is_dataclass(structure) and not isinstance(structure, type):
        fields = {f.name: getattr(structure, f.name) for f in dataclasses.fields(structure)}
        new = {name: map_tensors(value, change) for name, value in fields.items()}
        if all(new[name] is fields[name] for name in fields):
            return structure
        twin: Any = copy.copy(structure)
        for name, value in new.items():
            object.__setattr__(twin, name, value)
        return twin
    return structure


class Swaps:
    """The tensors that were replaced in a caller's own lists, dicts and dataclasses."""

    def __init__(self) -> None:
        # Each container, and what stands in it for which; the replacements are kept alive, so that
        # no other object can have their place in memory.
        self._made: list[tuple[Any, dict[int, tuple[Any, Any]]]] = []

    def swap(self, structure: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Return ``structure`` with every tensor replaced that ``change`` changes.

        Containers that can be written to stay what they are, so that a forward that appends to a
        list appends to its caller's; tuples and frozen dataclasses are made anew.
        """
        if isinstance(structure, Tensor):
            return change(structure)
        if isinstance(structure, tuple):
            items = [self.swap(item, change) for item in structure]
            if all(new is old for new, old in zip(items, structure, strict=True)):
                return structure
            return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
        for key, value in _entries(structure):
            new = self.swap(value, change)
            if new is not value:
                if not self._made or self._made[-1][0] is not structure:
                    self._made.append((structure, {}))
                self._made[-1][1][id(new)] = new, value
                if not _write(structure, key, new):
                    self._made.pop()
                    return map_tensors(structure, change)
        return structure

    def undo(self) -> None:
        """Put back what still stands where `swap` has put it."""
        while self._made:
            container, replaced = self._made.pop()
            for key, value in _entries(container):
                if id(value) in replaced:
                    _write(container, key, replaced[id(value)][1])


def _entries(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, list):
        return list(enumerate(container))
    if isinstance(container, dict):
        return list(container.items())
    if dataclasses.is_dataclass(container) and not isinstance(container, type):
        return [
            (spec.name, getattr(container, spec.name)) for spec in dataclasses.fields(container)
        ]
    return []


def _write(container: Any, key: Any, value: Any) -> bool:
    """Write an entry; False if the container cannot be written to."""
    try:
        if isinstance(container, (list, dict)):
            container[key] = value
        else:
            setattr(container, key, value)
    except (AttributeError, TypeError):
        return False
    return True


def holds_unknown(structure: Any) -> bool:
    """True if something in ``structure`` may hide tensors that `tensors_in` does not find."""
    if structure is None or isinstance(structure, (Tensor, str, bytes, bool, Number)):
        return False
    if isinstance(structure, (tuple, list)):
        return any(map(holds_unknown, structure))
    if isinstance(structure, dict):
        return any(map(holds_unknown, structure.values()))
    return not dataclasses.is_dataclass(structure)


def hook_outputs(
    tensors: Iterable[Tensor], first_node: int, hook: Callable[[object], None]
) -> None:
    """Run ``hook`` when gradients of ``tensors``, outputs of a call, come.

    ``first_node`` is the number that autograd has given the first node made in that call.
    """
    for tensor in tensors:
        # One unit's output is the next one's input. Hooks of a tensor run before those of the node
        # that made it, so that the next unit is over before this one begins.
        node = tensor.grad_fn
        if node is None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            continue
        node.register_prehook(hook)
        # An in-place change of a view puts other nodes in the place of the view's own. A base from
        # before the call is an input, whose gradient comes when the call is over.
        base = tensor._base.grad_fn if tensor._is_view() else None  # type: ignore[union-attr]
        if base is not None and base is not node and base._sequence_nr() >= first_node:
            base.register_prehook(hook)
