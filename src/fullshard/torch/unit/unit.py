# SPDX-License-Identifier: Apache-2.0
"""One unit: parameters that are gathered, freed and reduced by one call.

A unit knows its buffers and the state they are in, not when anything should happen: that is decided
by `fullshard.core.schedule` and carried out by `fullshard.torch.step.executor`. What rests is in
`fullshard.torch.unit.shards`, what is gathered in `fullshard.torch.unit.full_parameters`, the way
of gradients in `fullshard.torch.unit.gradients`.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter, is_, setitem
from typing import Any

import torch
from torch import Tensor

from fullshard.core.errors import NotSupportedError, UsageError
from fullshard.core.layout import Layout, lay_out
from fullshard.core.schedule import OpKind
from fullshard.torch.comm.protocol import Full, Parts
from fullshard.torch.comm.ranks import Ranks
from fullshard.torch.tensor.parameter import ShardedParameter
from fullshard.torch.tensor.put_off import PutOff
from fullshard.torch.tensor.tensor_parallel import TensorParallel
from fullshard.torch.unit.buffers import FlatBuffer, dtype_of
from fullshard.torch.unit.full_parameters import (
    CustomGather,
    FullParameters,
    GradientWatch,
    view_of,
)
from fullshard.torch.unit.gradients import Gradients, ReduceSettings
from fullshard.torch.unit.guards.lent import check_lent
from fullshard.torch.unit.guards.writes import Writes
from fullshard.torch.unit.packing import Unpacking
from fullshard.torch.unit.plan import Plan, own_value
from fullshard.torch.unit.shards import Shards
from fullshard.torch.unit.sites import Holder, Holders, ParamSites
from fullshard.torch.unit.streams import CopiesUnderWay, EarlyStream

_OWNER = "_fullshard_owner"
_version = attrgetter("_version")
_go_through = deque[Any](maxlen=0).extend


class UnitState(Enum):
    """The memory that a unit holds beside its shard."""

    __hash__: Any = object.__hash__  # that of Enum is slow

    RESTING = "nothing"
    FULL = "full parameters"
    FULL_WITH_GRADS = "full parameters and full gradients"
    GRADS = "full gradients"


_MOVES = {
    ("gather", UnitState.RESTING): UnitState.FULL,
    ("gather", UnitState.GRADS): UnitState.FULL_WITH_GRADS,
    ("free", UnitState.FULL): UnitState.RESTING,
    ("free", UnitState.FULL_WITH_GRADS): UnitState.GRADS,
    ("fill", UnitState.RESTING): UnitState.GRADS,
    ("fill", UnitState.FULL): UnitState.FULL_WITH_GRADS,
    ("reduce", UnitState.GRADS): UnitState.RESTING,
    ("reduce", UnitState.FULL_WITH_GRADS): UnitState.FULL,
    ("drop", UnitState.GRADS): UnitState.RESTING,
    ("drop", UnitState.FULL_WITH_GRADS): UnitState.FULL,
}
"""The only legal moves. A unit whose shard serves as its full parameters is always full."""

_FULL_STATES = (UnitState.FULL, UnitState.FULL_WITH_GRADS)
_STATES_WITHOUT_GRADS = (UnitState.RESTING, UnitState.FULL)


class Unit:
    """Parameters that travel together, sharded over ``plan.ranks.gather``.

    Building one replaces the parameters in their modules by `ShardedParameter`s that hold this
    rank's spans. ``name`` is for people: the path of the unit's module once the root is known.
    ``watch`` takes what autograd makes of gradients; it knows when to `deliver` them.
    """

    def __init__(self, name: str, params: Sequence[ParamSites], plan: Plan, watch: GradientWatch):
        self.name: str = name
        self.plan = plan
        self.ranks: Ranks = plan.ranks
        self.device: torch.device = plan.device
        self.copies: bool = plan.resting_device != plan.device  # shards come, gradients go
        self._watch = watch
        self._model = ""
        self.settings: ReduceSettings = ReduceSettings()
        self.custom_gather: CustomGather | None = None
        self.put_off: list[PutOff] = []  # steps of optimizers, until the shards are used
        self.on_gather: list[Callable[[], None]] = []  # called when a gather is under way
        self._lent: set[tuple[int, str]] = set()  # sites that show what functional_call put there
        self._holders = Holders()
        specs = (each.spec for each in params)
        layout = lay_out(specs, self.ranks.gather.size, plan.precision, plan.align)
        on_meta = plan.values is own_value and any(each.param.is_meta for each in params)
        device = torch.device("meta") if on_meta else plan.resting_device
        # A rank was on the meta device, and nobody has looked for values since: all look together.
        self.unchecked: bool = plan.bare_somewhere
        self.replicas_unchecked: bool = self.ranks.replicas.size > 1
        for each in params:
            set_owner(each.param, self, each.spec.name)
        self.rest_in(Shards(params, layout, plan, device, {}))

    # ---- building -------------------------------------------------------------------------------

    def rest_in(self, shards: Shards) -> None:
        """Rest in ``shards``; make what they are gathered into, and what gradients need."""
        self.shards = shards
        # Until modules have been given memory for all of the unit's parameters.
        self.on_meta: bool = shards.device.type == "meta"
        self.layout: Layout = shards.layout
        self.trainable: bool = any(shards.seen_trainable)  # there is something to reduce
        self.params: list[ParamSites] = shards.params
        self.sharded: list[ShardedParameter] = shards.sharded
        self.gradients: Gradients = Gradients(self.name, shards, self.plan, self.settings)
        self._watch.begin_anew()
        self.full: FullParameters = FullParameters(self.name, shards, self.plan, self._watch)
        self.state = UnitState.FULL if self.resident else UnitState.RESTING
        # What is written to a resident unit stays, and extensions write to their own.
        apart = any(each.spec.apart for each in self.params)
        self._writes = None if self.resident or apart else Writes(self.full.params)
        self._sites = [(*site, i) for i, each in enumerate(self.params) for site in each.sites]
        # The same as columns, to be gone through without a loop of Python.
        self._tables = [table for table, _, _ in self._sites]
        self._keys = [key for _, key, _ in self._sites]
        self._indices = [index for _, _, index in self._sites]
        self._in_order = self._indices == list(range(len(self.params)))  # without ties
        for each, param in zip(self.params, self.sharded, strict=True):
            set_owner(param, self, each.spec.name)
        cuts = enumerate(each.tensor_parallel for each in self.params)
        self.cuts: dict[int, TensorParallel] = {i: cut for i, cut in cuts if cut is not None}
        self.belong_to(self._model)
        self.show_sharded()

    def rename(self, name: str) -> None:
        """Take the name by which the whole model knows the unit's module; parameters follow."""
        self.shards.rename(name)
        self.name = name or "(root)"
        self.belong_to(self._model)

    def belong_to(self, model: str) -> None:
        """Tell gathers and reduces from those of other models of the same ranks.

        Gloo delivers slices by what ranks say that they are, so models cannot take each other's.
        """
        self._model = model
        self.full.rename(self.name, model)
        self.gradients.rename(self.name, model)

    # ---- what modules show ----------------------------------------------------------------------

    def show_full(self) -> None:
        """Let the modules use the full parameters; whoever needs them now has gathered them."""
        self._show(self.full.params)

    def show_sharded(self) -> None:
        """Let the modules show the sharded parameters."""
        self._show(self.sharded)

    def hide_full(self) -> None:
        """Let the modules show the sharded parameters where they show full ones, and only there."""
        full = self.full.params
        for parameters, key, index in self._sites:
            if full and parameters.get(key) is full[index]:
                parameters[key] = self.sharded[index]
        if self._holders.held:
            self._show_in_holders(self.sharded)

    def follow(self, holder: Holder, index: int) -> None:
        """Let a list or dict of the user's show from now on what modules show of a parameter."""
        self._holders.follow(holder, self.params[index].spec.name, self.sharded[index])

    def _show_in_holders(self, values: Sequence[Tensor]) -> None:
        full = self.full.params or self.sharded
        named = zip(self.params, values, self.sharded, full, strict=True)
        self._holders.show({each.spec.name: (value, *ours) for each, value, *ours in named})

    def _show(self, values: Sequence[Tensor]) -> None:
        if self._holders.held:
            self._show_in_holders(values)
        if self._lent:
            for parameters, key, index in self._sites:
                if (id(parameters), key) not in self._lent:
                    parameters[key] = values[index]
            return
        shown = values if self._in_order else map(values.__getitem__, self._indices)
        _go_through(map(setitem, self._tables, self._keys, shown))

    def check_shown(self) -> None:
        """Look at what modules show before it is replaced by full parameters for a forward.

        Full tensors that `torch.func.functional_call` has put there stay, until it takes them away.
        Raises `UsageError` for anything else that is not the unit's own: training would go on with
        the old parameter, and an optimizer over the new one would train nothing.
        """
        sharded, full = self.sharded, self.full.params
        self._lent.clear()
        found = map(dict.get, self._tables, self._keys)
        shown = sharded if self._in_order else map(sharded.__getitem__, self._indices)
        if all(map(is_, found, shown)):
            return
        for parameters, key, index in self._sites:
            value = parameters.get(key)
            if value is not sharded[index] and not (full and value is full[index]):
                check_lent(sharded[index], value, missing=key not in parameters)
                self._lent.add((id(parameters), key))
        if self._lent:
            self._check_lent_everywhere()

    def forget_lent(self) -> None:
        """Take what modules show now for the unit's own, whoever has put it there."""
        self._lent.clear()

    def _check_lent_everywhere(self) -> None:
        lent = {index for table, key, index in self._sites if (id(table), key) in self._lent}
        for parameters, key, index in self._sites:
            name = self.sharded[index].ownership.name
            if index in lent and (id(parameters), key) not in self._lent:
                raise UsageError(
                    f"functional_call got a value for one use of {name!r}, which is tied, and none "
                    "for another; give it one under each of its names "
                    "(named_parameters(remove_duplicate=False))"
                )

    def refuse_unequal(self, what: str) -> None:
        """Raise `NotSupportedError` if slices are unequal, which ``what`` cannot send."""
        if any(segment.ends for segment in self.layout.segments):
            raise NotSupportedError(
                f"{what} sends equal slices, and unit {self.name!r} keeps matrices whole on one "
                'rank each: shard it with align="row" or "element"'
            )

    # ---- gather and free ------------------------------------------------------------------------

    def _move(self, op: str) -> None:
        after = _MOVES.get((op, self.state))
        if after is None:
            raise UsageError(
                f"unit {self.name!r}: cannot {op} while it holds {self.state.value}; "
                "this is a defect of fullshard's schedule, please report it with a trace"
            )
        self.state = after

    @property
    def is_full(self) -> bool:
        """True if the full parameters are there, or on their way."""
        return self.state in _FULL_STATES

    @property
    def resident(self) -> bool:
        """True if the shard serves as the full unit, which then is always full."""
        return self.full.resident

    @property
    def transient_bytes(self) -> int:
        """Bytes held now beyond the shards: full parameters, full gradients, reduce scratch."""
        return self.full.bytes + self.gradients.transient_bytes

    @property
    def stale(self) -> bool:
        """True if the full parameters were gathered before the shard was last changed."""
        return (self.is_full or self.full.part is not None) and self.full.outdated

    def begin_forward(self) -> None:
        """Show the full parameters, and watch for writes to them. See [Note: Writes in forward]."""
        self.use()
        writes = self._writes
        if writes is not None:
            writes.versions = list(map(_version, self.full.params))
            if writes.is_first:
                writes.take_values()

    def end_forward(self, *, show_sharded: bool) -> None:
        """Raise `UsageError` if forward has written to the full parameters."""
        writes = self._writes
        if writes is not None and writes.versions is not None and not self._lent:
            versions = list(map(_version, self.full.params))
            if writes.is_first or versions != writes.versions:
                writes.check(versions, [param.ownership.name for param in self.sharded])
            writes.versions = None  # an error in a gather ends a forward that has not begun
        if show_sharded:
            self._show(self.sharded)

    def use(self) -> None:
        """Show the full parameters, gathered now if somebody has resharded them meanwhile.

        Or written to the shards, as a model does in its forward whose weights follow others.
        """
        if self.params and (self.state not in _FULL_STATES or self.full.outdated):
            self.gather()
            self.full.wait()
        else:
            self.full.reach()
        self._show(self.full.params)

    # What a schedule asks for gives False if it was done already, by users or by itself.

    def gather(self, early: EarlyStream | None = None) -> bool:
        """Start to gather the full parameters, anew if they are stale (collective).

        ``early``: beside the computation that is queued already, if that can be.
        """
        if self.put_off:
            self.catch_up()
        full, is_full = self.full, self.state in _FULL_STATES
        if is_full and not full.outdated:
            return False
        if full.out_of_reach is not None:
            full.refuse_out_of_reach(full.out_of_reach)
        if is_full or (full.part is not None and full.outdated):
            self.free()
        self._move("gather")
        try:
            if early is not None and self.custom_gather is None:
                full.gather_early(early)
            else:
                full.gather(self.custom_gather)
        except BaseException:  # out of memory, for one
            full.abandon()
            self._move("free")
            raise
        for tell in self.on_gather:
            tell()
        return True

    def catch_up(self) -> None:
        """Make the steps of optimizers that were put off."""
        failures: list[Exception] = []
        for each in self.put_off:
            try:
                each.catch_up()
            except Exception as error:
                failures.append(error)
        self.put_off.clear()
        if failures:
            raise failures[0]

    def await_gather(self) -> bool:
        """Wait until the full parameters are there."""
        self.full.wait()
        return True

    def shrink(self) -> bool:
        """Drop the full parameters but for this rank's part among those of its block."""
        if self.state not in _FULL_STATES and self.full.part is None:
            return False
        self._move("free")
        self.full.shrink()
        return True

    def free(self) -> bool:
        """Drop the full parameters, or the part that `shrink` has left."""
        if self.state not in _FULL_STATES and self.full.part is None:
            return False
        if self.full.drop():
            self._move("free")
        return True

    # ---- gradients ------------------------------------------------------------------------------

    def deliver(self, index: int, grad: Tensor) -> None:
        """Take a parameter's gradient, or a further part of it."""
        self.fill()
        if self.cuts and index in self.cuts:
            grad = self.cuts[index].part_of_dtensor(grad)
        self.gradients.full.put(index, grad)

    def fill(self) -> None:
        """Note that there are full gradients."""
        if self.state in _STATES_WITHOUT_GRADS:
            self._move("fill")

    def reduce(self) -> bool:
        """Start to reduce the full gradients; what did not come counts as zero (collective)."""
        self.fill()
        self._move("reduce")
        self.gradients.reduce()
        return True

    def all_reduce(self) -> bool:
        """Await the sum over slices and start the one over replicas (collective)."""
        if not self.gradients.reducing:
            return False
        self.gradients.all_reduce()
        return True

    def await_reduce(self) -> bool:
        """Wait for the reduce and add its result, averaged over the ranks, to ``.grad``."""
        return self.gradients.await_all()

    def drop_gradients(self) -> None:
        """Forget full gradients, under way or not, after a backward that failed."""
        self.gradients.drop()
        if self.state not in _STATES_WITHOUT_GRADS:
            self._move("drop")

    def synchronize(self) -> None:
        """Hold up the host until it may read gradients and write shards that rest there."""
        self.full.synchronize()
        self.gradients.synchronize()

    def copies_under_way(self) -> CopiesUnderWay:
        """Return the copies that `synchronize` waits for."""
        last = self.full.last_fetch, self.gradients.last_copy
        return CopiesUnderWay(self.device, [event for event in last if event is not None])

    def settle(self) -> None:
        """Synchronize as a step ends; where one of an optimizer is put off, on the first look."""
        grads = (param.grad for param in self.sharded if param.grad is not None)
        if not self.put_off or any("local" in grad.__dict__ for grad in grads):
            self.synchronize()
            return
        self.gradients.let_go()
        others = [param for param in self.sharded if "local" in param.__dict__]
        if others:  # frozen, or of no optimizer; perhaps they are being fetched still
            self.put_off.append(PutOff(others, self.full.synchronize))

    # ---- between steps --------------------------------------------------------------------------

    @torch.no_grad()
    def gather_values(self) -> FlatBuffer:
        """All segments in full, in the dtypes in which they rest, in new memory. Collective."""
        self.catch_up()
        segments = self.layout.segments
        sizes = [(s.full_numel, dtype_of(s.dtype)) for s in segments]
        if self.shards.device.type == "meta":
            return FlatBuffer(sizes, self.shards.device)
        full, rank = FlatBuffer(sizes, self.device), self.ranks.gather.rank
        pairs: list[tuple[Full, Tensor]] = []
        travelling = full.flats.copy()
        for number, shard in enumerate(self.shards.flats):
            if segments[number].travels_apart:
                travelling[number] = torch.empty_like(full.flats[number])
            flat, unequal = travelling[number], segments[number].unequal
            mine = flat[segments[number].slice_of(rank)].copy_(shard)
            pairs.append((flat if unequal is None else Parts(flat, unequal), mine))
        if pairs:
            label = f"gather of values of unit {self.name!r}"
            self.ranks.gather.all_gather(pairs, label=label).wait()
        arrived = zip(segments, travelling, full.flats, strict=True)
        Unpacking(each for each in arrived if each[0].travels_apart).copy()
        return full

    def full_views(self, full: FlatBuffer) -> list[Tensor]:
        """The parameters in what `gather_values` gave, in the order of ``params``."""
        views = [view_of(full.flats, place) for place in self.shards.places]
        cuts = [each.tensor_parallel for each in self.params]
        return [v if c is None else c.dtensor(v) for v, c in zip(views, cuts, strict=True)]


ACTIONS: dict[OpKind, Callable[[Unit], bool]] = {
    OpKind.GATHER: Unit.gather,
    OpKind.AWAIT_GATHER: Unit.await_gather,
    OpKind.SHRINK: Unit.shrink,
    OpKind.FREE: Unit.free,
    OpKind.REDUCE: Unit.reduce,
    OpKind.ALL_REDUCE: Unit.all_reduce,
    OpKind.AWAIT_REDUCE: Unit.await_reduce,
}
"""The functions that carry out the ops of a schedule; each gives False if it had nothing to do."""


def owner_of(param: Tensor) -> "tuple[Unit, int] | None":
    """The unit that a parameter was given to, if it still exists, and its number there."""
    reference, name = getattr(param, _OWNER, (None, ""))
    unit = None if reference is None else reference()
    names = [] if unit is None else [each.spec.name for each in unit.params]
    return None if unit is None or name not in names else (unit, names.index(name))


def is_of_a_unit(value: Any) -> bool:
    """Return True if a unit has ``value`` as one of its sharded parameters now."""
    owned = owner_of(value)
    return owned is not None and owned[0].sharded[owned[1]] is value


def set_owner(param: Tensor, unit: "Unit", name: str) -> None:
    """Note on an original parameter which unit has it now, and its name there."""
    setattr(param, _OWNER, (weakref.ref(unit), name))
