# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer that are made later, of what is collected now."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from fullshard.torch.optim.merged_step import Lists, MergedStep, Merging, goes_with
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter


@dataclass(frozen=True)
class _Filled:
    """One group's lists, what ``_init_group`` returned for them, and the plan of their runs."""

    lists: Lists
    result: Any
    plan: Merging | None


class FilledStep:
    """A step of plain tensors: any thread can make it, whatever becomes of groups and ``.grad``.

    Nobody may look meanwhile at the tensors that it changes.
    """

    def __init__(self, optimizer: Optimizer, groups: list[dict[str, Any]], lists: list[_Filled]):
        self._kind, self._attributes = type(optimizer), {**vars(optimizer), "param_groups": groups}
        self._lists = lists

    @classmethod
    def of(
        cls, optimizer: Optimizer, groups: list[dict[str, Any]], merged: MergedStep
    ) -> "FilledStep | None":
        """Return a step of ``groups``; None if it must be made at once, by the optimizer itself."""
        found: list[_Filled] = []
        for group in groups:
            filled = _Filled(*merged.fill(group))
            first_momentum = group.get("momentum") and None in filled.lists[2]
            if first_momentum or not _take_spans(filled.lists, group):
                return None
            found.append(filled)
        return cls(optimizer, groups, found)

    def make(self) -> None:
        """Make the step, unless it was begun; without the hooks of users and schedulers."""
        lists, self._lists = self._lists, []  # gradients go with this call
        if not lists:
            return
        remaining = iter(lists)

        def hand_out(group: dict[str, Any], *to: list[Any]) -> Any:
            filled = next(remaining)
            for column, found in zip(to, filled.lists, strict=True):
                column += found
            return filled.result

        # An optimizer that has only this to do. Nothing is left to be put into its state.
        alone: Any = object.__new__(self._kind)
        alone.__dict__.update(self._attributes, state=defaultdict(dict), _init_group=hand_out)
        try:
            self._kind.step.__wrapped__(alone)  # type: ignore[attr-defined]
        finally:
            for filled in lists:
                count_change(*filled.lists[0])  # which fused steps do not
                if filled.plan is not None:
                    filled.plan.finish()


def _take_spans(lists: Lists, group: dict[str, Any]) -> bool:
    """Put spans in place of what is in no run; return False if that would be another step."""
    for i, param in enumerate(lists[0]):
        if not isinstance(param, ShardedParameter):
            continue  # a run
        if param.device.type != "cpu" and group.get("foreach") is group.get("fused") is None:
            return False  # torch steps plain tensors of a device by other kernels
        for column in filter(None, lists):
            item = column[i]
            if goes_with(item, param):
                column[i] = item.local
            elif item is not None and (isinstance(item, ShardedParameter) or item.dim()):
                return False
    return True
