# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps on a few long plain tensors instead of on every parameter.

[Note: Runs of spans]
The spans of a unit lie one behind the other in its shard, and their gradients in the reduced ones.
An optimizer that treats every element by itself may take such a run for one plain tensor: it has
less to do for each parameter, and nothing goes through the dispatch of `ShardedParameter`.

torch's optimizers collect parameters, gradients and state into lists (``_init_group``), and work on
these. So the lists are what is changed: what belongs to a run becomes one view. Hooks, closures,
``param_groups`` and the state of each parameter are as ever: each has its own tensors, whose memory
is moved so that it lies in runs, too. Numbers beside the state (``step``) must be equal in a run;
the step changes those of the first parameter, and the others are given a copy. What does not fit (a
plain parameter, a gradient of another kind) stays as it is.

A unit's spans need not come one after the other in the optimizer: small parameters are packed, and
lie before large ones. So runs are looked for in the order of memory, and go on over zeros, which
elementwise steps leave as they are. On a CPU a run ends behind a span that is no multiple of 32
elements, unless it is a multiple with the zeros behind it and holds no elements of its parameter's
incomplete last turn of a vectorised loop. So every element keeps its place in such loops, or gets
the one that it has in the whole parameter: see [Note: Thirty-two elements] in
`fullshard.core.layout`.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter, sub
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from fullshard.core.layout import ALIGN_NUMEL
from fullshard.torch.state.apart import is_elementwise
from fullshard.torch.tensor.elementwise import count_change
from fullshard.torch.tensor.parameter import ShardedParameter

_ATTRIBUTE = "_fullshard_merged_step"
_MOST_READS = 64
"""How often numbers are read from a device to find out which are equal. Each read waits for it."""
_MOST_MISSES = 8
"""After so many steps on end that each need another plan, one is made only now and then."""
_TURN_BYTES = 128 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 64
"""Bytes that a turn of a CPU's vectorised loop takes: two registers."""

_version = attrgetter("_version")
_local = attrgetter("local")
_owner = attrgetter("ownership")
_grad = attrgetter("grad")

Lists = Sequence[list[Any]]
"""What ``_init_group`` has filled: parameters, gradients, then state by kind. Empty for a kind that
the optimizer does without, else with a place for each parameter."""


class MergedStep:
    """The merging of what one optimizer collects for its steps; see [Note: Runs of spans]."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._collect: Callable[..., Any] = type(optimizer)._init_group  # type: ignore[attr-defined]
        self._plans: dict[int, Merging] = {}  # by the first parameter collected
        self._misses: dict[int, int] = {}  # for how many steps on end there was none that fits
        self._unfinished: Merging | None = None
        self._reads = 0
        # Returns what is to be collected of a group.
        self.prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @classmethod
    def of(cls, optimizer: Optimizer) -> "MergedStep | None":
        """Return that of ``optimizer``, made with the first call; None for an unknown class."""
        known: MergedStep | None = optimizer.__dict__.get(_ATTRIBUTE)
        if known is not None or not is_elementwise(type(optimizer)):
            return known
        merged = cls(optimizer)
        optimizer.__dict__[_ATTRIBUTE] = merged
        optimizer._init_group = merged._collect_merged  # type: ignore[attr-defined]
        # Before hooks of users, who may look at the state.
        handle = optimizer.register_step_post_hook(merged.finish)
        optimizer._optimizer_step_post_hooks.move_to_end(  # type: ignore[attr-defined]
            handle.id, last=False
        )
        return merged

    def _collect_merged(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        """Collect as the optimizer's ``_init_group`` does, with runs in place of parameters."""
        self.finish()  # the group before this one, or a step that failed
        if self.prepare is not None:
            group = self.prepare(group)
        optimizer: Any = self._optimizer()
        params = group["params"]
        if not params or group.get("differentiable") or torch.compiler.is_compiling():
            return self._collect(optimizer, group, *lists)
        plan = self._plans.get(id(params[0]))
        grads = None if plan is None else plan.collect(optimizer.state, group, lists)
        if plan is None or grads is None:
            result = self._collect(optimizer, group, *lists)
            over_zeros = group.get("eps") != 0  # else they would become 0 / 0
            plan, grads = self._plan_for(lists, over_zeros) if lists[0] else (None, None)
            if plan is None or grads is None:
                return result
            plan.remember(optimizer.state, group, lists, result)
        else:
            self._misses.pop(id(params[0]), None)
        self._unfinished = plan
        plan.apply(lists, grads)
        return plan.result

    def _plan_for(
        self, lists: Lists, over_zeros: bool
    ) -> tuple["Merging | None", list[Tensor] | None]:
        """Return the plan that fits, made now if need be, and the gradients of its runs.

        These go on ``over_zeros`` between spans, or end there.
        """
        key = id(lists[0][0])
        plan = self._plans.get(key)
        fits = plan is not None and plan.over_zeros == over_zeros
        grads = plan.merged_grads(lists) if plan is not None and fits else None
        if grads is not None:
            self._misses.pop(key, None)
            return plan, grads
        self._plans.pop(key, None)
        misses = self._misses[key] = self._misses.get(key, 0) + 1
        if misses > _MOST_MISSES and misses % _MOST_MISSES:
            return None, None  # other gradients in each step: plans cost more than they bring
        plan = Merging(lists, self._equal_numbers, over_zeros)
        grads = plan.merged_grads(lists)
        if grads is not None:
            self._plans[key] = plan
            self._watch(plan, lists, key)
        return plan, grads

    def _watch(self, plan: "Merging", lists: Lists, key: int) -> None:
        reference = weakref.ref(self)

        def forget(_: object) -> None:
            merged = reference()
            if merged is not None:
                merged._plans.pop(key, None)

        plan.watch(lists, forget)

    def fill(self, group: dict[str, Any]) -> tuple[Lists, Any, "Merging | None"]:
        """Collect ``group`` as a step would.

        Returns the lists, what ``_init_group`` returns, and what to finish after the step.
        """
        kinds = len(inspect.signature(self._collect).parameters) - 2
        lists: Lists = tuple([] for _ in range(kinds))
        optimizer: Any = self._optimizer()
        result = optimizer._init_group(group, *lists)
        plan, self._unfinished = self._unfinished, None
        return lists, result, plan

    def finish(self, *_: Any) -> None:
        """Give all parameters of a run the numbers of the first, when a group has been stepped."""
        plan, self._unfinished = self._unfinished, None
        if plan is None:
            return
        plan.finish()
        optimizer = self._optimizer()
        if isinstance(optimizer, SGD):  # puts buffers back by what it takes for parameters
            for run in plan.runs:
                optimizer.state.pop(run.param, None)

    def _equal_numbers(self, numbers: list[Tensor]) -> list[Any]:
        """Return a key per number; equal values share a key."""
        classes: list[Any] = [None] * len(numbers)
        by_kind: dict[Any, list[int]] = {}
        for i, number in enumerate(numbers):
            by_kind.setdefault((number.device, number.dtype), []).append(i)
        for kind, indices in by_kind.items():
            if kind[0].type != "cpu":
                self._reads += 1
            if kind[0].type == "cpu":
                values: list[Any] = [numbers[i].item() for i in indices]
            elif self._reads > _MOST_READS or is_capturing(kind[0]):
                values = indices  # nobody knows: each for itself
            else:
                values = torch.stack([numbers[i] for i in indices]).tolist()
            for i, value in zip(indices, values, strict=True):
                classes[i] = (kind, value)
        return classes


def is_capturing(device: torch.device) -> bool:
    """Return True while a CUDA graph is captured, when no value can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _SpanRun:
    """Parameters whose spans, and the gradients of these, follow each other in memory."""

    def __init__(self, first: int, kind: Any):
        self.kind = kind  # dtypes and devices, and values of the numbers, equal for all
        self.first = first  # whose numbers the step changes
        self.members = [first]
        self.held: list[int] = []  # those of which this rank has elements
        self.numel = 0
        self.param: Tensor  # all spans as one, when the run is complete
        self._starts: list[int] = []  # of those that are held, in elements
        self._next = 0  # where another span may start
        self._ends: list[tuple[int, int]] = []  # of what spans and gradients take: see `_where`

    def takes(self, kind: Any, span: Tensor, grad: Tensor) -> bool:
        """Return True if this span and gradient begin where the run ends; empty ones always do."""
        if kind != self.kind:
            return False
        if not span.numel() or not self.held:
            return True
        # Rows of any number may touch. Devices treat all elements alike, wherever they are.
        whole = self._next % ALIGN_NUMEL == 0 or span.device.type != "cpu"
        return whole and self._ends == [_where(span), _where(grad)]

    def add(self, place: int, span: Tensor, grad: Tensor, takes: int) -> None:
        """Append the span at ``place``, which ``takes`` so many elements with zeros behind it."""
        if span.numel():
            self.held.append(place)
            self._starts.append(self._next)
            self.numel = self._next + span.numel()
            self._next += takes
            self._ends = [_where(each, behind=takes) for each in (span, grad)]

    def view(self, items: Sequence[Any]) -> Tensor:
        """View the memory of the run in ``items``, which have a place for each parameter."""
        first: Tensor = items[self.held[0] if self.held else self.first].local
        return first if len(self.held) < 2 else first.as_strided((self.numel,), (1,))

    def joined(self, items: Sequence[Any]) -> Tensor:
        """View state as `view` does, after moving it into a run if it does not lie in one."""
        if len(self.held) < 2:
            return self.view(items)
        parts: list[Tensor] = [items[i].local for i in self.held]
        if [_where(part) for part in parts] == [_where(parts[0], behind=n) for n in self._starts]:
            return self.view(items)
        together = parts[0].new_zeros(self.numel)
        for i, part, start in zip(self.held, parts, self._starts, strict=True):
            items[i].local = together[start : start + part.numel()].copy_(part)
        return together


def _where(part: Tensor, *, behind: int = 0) -> tuple[int, int]:
    """Return storage and address at which ``part`` begins, or the elements ``behind`` it."""
    return part.untyped_storage().data_ptr(), part.data_ptr() + behind * part.element_size()


def taken(param: ShardedParameter) -> int:
    """Return how many elements the span of ``param`` takes in a run, with the zeros behind it."""
    owner, span = param.ownership, param.local
    turn = _TURN_BYTES // span.element_size() if span.device.type == "cpu" else 1
    is_tail = owner.span.stop > owner.numel // turn * turn
    alone = is_tail or owner.room % ALIGN_NUMEL != 0 or not owner.room
    return span.numel() if alone else owner.room


class Merging:
    """The replacements in the lists of one group, valid while these hold the same tensors."""

    def __init__(self, lists: Lists, equal: Callable[[list[Tensor]], list[Any]], over_zeros: bool):
        self.over_zeros = over_zeros
        self._columns = [k for k in range(2, len(lists)) if lists[k]]  # of state
        self.runs: list[_SpanRun] = []
        self._rows: list[int] = []  # what the lists become, by its place in runs and then lists
        self._find_runs(lists, equal)
        self._members = [i for run in self.runs for i in run.members]
        # Places of spans that this rank has elements of; the first of each one's run among these.
        self._held: list[int] = []
        self._firsts: list[int] = []
        for run in self.runs:
            self._firsts += [len(self._held)] * len(run.held)
            self._held += run.held
        self._offsets = self._find_offsets(lists[1])
        self._lengths = list(map(len, lists))
        self._numbers: list[Tensor] = []
        # The number of a run's first parameter is copied to the others.
        self._others: list[Tensor] = []
        self._copied: list[Tensor] = []
        self._state: dict[int, list[Tensor]] = {}  # by column, for each run
        for run in self.runs:
            run.param = run.view(lists[0])
        fitting = self._columns if self.runs else []
        first = self._members[0] if self.runs else 0
        self._cut = [k for k in fitting if isinstance(lists[k][first], ShardedParameter)]
        for k in fitting:
            if k in self._cut:
                self._state[k] = [run.joined(lists[k]) for run in self.runs]
            else:
                self._state[k] = self._take_numbers(lists[k])
        self._ids = self._find_ids(lists)
        self._versions = list(map(_version, self._numbers))
        self._watched: list[weakref.ref[Any]] = []
        self.result: Any = None  # of the optimizer's ``_init_group``
        self._settings: Any = None  # of the group, if it need not be asked again
        self._getters: dict[int, Callable[[Any], Any]] = {}  # from a parameter's state, by column

    def remember(self, state: Any, group: dict[str, Any], lists: Lists, result: Any) -> None:
        """Note where the optimizer has found what it put into ``lists``, if `collect` can, too."""
        params, self.result, self._settings = group["params"], result, None
        if not len(params) == len(lists[0]) == len(self._members):
            return
        for k in self._columns:
            name = next((n for n, each in state[params[0]].items() if each is lists[k][0]), None)
            if any(
                state[p].get(name) is not each for p, each in zip(params, lists[k], strict=True)
            ):
                return
            self._getters[k] = itemgetter(name)
        self._settings = _settings_of(group)

    def collect(self, state: Any, group: dict[str, Any], lists: Lists) -> list[Tensor] | None:
        """Fill ``lists`` as the optimizer would, and return `merged_grads`.

        None if it must do so itself, as something is not as it was; ``lists`` are then empty.
        """
        if self._settings is None or _settings_of(group) != self._settings:
            return None
        params = group["params"]
        grads = list(map(_grad, params))
        states = list(map(state.get, params)) if self._getters else []
        if not all(states):
            return None
        try:
            columns = {k: list(map(get, states)) for k, get in self._getters.items()}
        except KeyError:
            return None
        for k, column in {0: params, 1: grads, **columns}.items():
            lists[k][:] = column
        found = self.merged_grads(lists)
        if found is None:
            for each in lists:
                each.clear()
        return found

    def _find_offsets(self, grads: Sequence[Any]) -> list[int]:
        """Return how many bytes each gradient that is held lies behind the first of its run."""
        at = [grads[place].local.data_ptr() for place in self._held]
        return list(map(sub, at, map(at.__getitem__, self._firsts)))

    def _find_ids(self, lists: Lists) -> list[list[int]]:
        """Return the identities of members; of what is sharded, of its span.

        That may become another one, moved by another plan too.

        Raises `AttributeError` if something is sharded no more.
        """
        ids = [list(map(id, map(_local, map(lists[0].__getitem__, self._members))))]
        for k in self._state:
            items: Any = map(lists[k].__getitem__, self._members)
            ids.append(list(map(id, map(_local, items) if k in self._cut else items)))
        return ids

    def _find_runs(self, lists: Lists, equal: Callable[[list[Tensor]], list[Any]]) -> None:
        params, grads, *_ = lists
        kinds = [
            _kind(param, grad, [lists[k][i] for k in self._columns])
            for i, (param, grad) in enumerate(zip(params, grads, strict=True))
        ]
        # One that has numbers where others have spans stays as it is.
        cut = next((kind[0] for kind in kinds if kind is not None), ())
        kinds = [kind if kind is not None and kind[0] == cut else None for kind in kinds]
        columns = [k for k, is_cut in zip(self._columns, cut, strict=False) if not is_cut]
        fitting = [i for i, kind in enumerate(kinds) if kind is not None]
        values = {
            k: dict(zip(fitting, equal([lists[k][i] for i in fitting]), strict=True))
            for k in columns
        }
        run: _SpanRun | None = None
        for i in sorted(fitting, key=lambda i: _where(params[i].local)):
            span, grad = params[i].local, grads[i].local
            kind = (*(kinds[i] or ()), *(values[k][i] for k in columns))
            if run is not None and run.takes(kind, span, grad):
                run.members.append(i)
            else:
                run = _SpanRun(i, kind)
                self.runs.append(run)
            run.add(i, span, grad, taken(params[i]) if self.over_zeros else span.numel())
        self.runs.sort(key=attrgetter("first"))
        order = {run.first: row for row, run in enumerate(self.runs)}
        by_themselves = {i: len(order) + i for i, kind in enumerate(kinds) if kind is None}
        self._rows = [row for _, row in sorted((order | by_themselves).items())]

    def _take_numbers(self, items: Sequence[Tensor]) -> list[Tensor]:
        for run in self.runs:
            first = items[run.first]
            others = [items[i] for i in run.members if i != run.first]
            self._others += others
            self._copied += [first] * len(others)
            self._numbers += [first, *others]
        return [items[run.first] for run in self.runs]

    def watch(self, lists: Lists, forget: Callable[[Any], None]) -> None:
        """Call ``forget`` when any tensor of the plan is garbage-collected.

        So the plan keeps no memory alive, and the identities that it knows are those of the living.
        """
        state = [item for k in self._columns for item in lists[k] if item is not None]
        spans = [getattr(item, "local", item) for item in (*lists[0], *state)]
        tensors = [*spans, *(item for item in state if isinstance(item, ShardedParameter))]
        self._watched = [weakref.ref(tensor, forget) for tensor in tensors]

    def merged_grads(self, lists: Lists) -> list[Tensor] | None:
        """Return the gradients of the runs as they are now; None if the plan does not fit."""
        if not self.runs or list(map(len, lists)) != self._lengths:
            return None
        if list(map(_version, self._numbers)) != self._versions:
            return None  # somebody has changed them, and they may differ
        params, grads = (list(map(each.__getitem__, self._members)) for each in lists[:2])
        try:
            cut_alike = all(map(is_, map(_owner, grads), map(_owner, params)))
            if not (cut_alike or all(map(goes_with, grads, params))):
                return None
            contiguous = all(map(Tensor.is_contiguous, map(_local, grads)))
            if not contiguous or self._find_ids(lists) != self._ids:
                return None
            if self._find_offsets(lists[1]) != self._offsets:
                return None
            return [run.view(lists[1]) for run in self.runs]
        except (AttributeError, RuntimeError):
            return None  # something is sharded no more, or lies at such addresses by chance

    def apply(self, lists: Lists, merged_grads: list[Tensor]) -> None:
        """Change ``lists``, which the plan fits."""
        merged = {0: [run.param for run in self.runs], 1: merged_grads, **self._state}
        for k, tensors in merged.items():
            lists[k][:] = map([*tensors, *lists[k]].__getitem__, self._rows)
        # Fused steps count no change of their own.
        count_change(*merged[0])

    def finish(self) -> None:
        """After the step: numbers that are equal stay equal."""
        if self._others:
            torch._foreach_copy_(self._others, self._copied)
        self._versions = list(map(_version, self._numbers))


def _settings_of(group: dict[str, Any]) -> Any:
    """Return what an optimizer looks at when it collects, and what it does not care for."""
    others = [(name, value) for name, value in group.items() if name not in ("params", "lr")]
    return type(group.get("lr")), others


def goes_with(value: Any, param: ShardedParameter) -> bool:
    """Return True if ``value`` is cut as ``param`` is and lies in memory in the same way."""
    if not isinstance(value, ShardedParameter):
        return False
    owner, local = value.ownership, value.local
    return (
        owner is param.ownership or owner.agrees_with(param.ownership)
    ) and local.is_contiguous()


def _kind(param: Any, grad: Any, state: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return what must be equal within a run, cut names of ``state`` first; None if odd."""
    if not isinstance(param, ShardedParameter) or not goes_with(grad, param):
        return None
    cut = tuple(goes_with(each, param) for each in state)
    for each, is_cut in zip(state, cut, strict=True):
        if not is_cut and (type(each) is not Tensor or each.dim() or each.requires_grad):
            return None
    tensors = (param, grad, *(each for each, is_cut in zip(state, cut, strict=True) if is_cut))
    return cut, *((tensor.dtype, tensor.device) for tensor in tensors)
