# SPDX-License-Identifier: Apache-2.0
"""The parameter that a sharded model shows: of global shape, holding one rank's span.

Parameters, gradients and optimizer state are all of this type. `fullshard.torch.tensor.rules` says
how torch operations run on it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.simple_registry import GenericTorchDispatchRuleHolder
from torch._ops import OpOverload
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fullshard.core.errors import NotSupportedError, UnshardedOperationError
from fullshard.core.layout import Span
from fullshard.torch.comm.watch.roll_call import call_roll
from fullshard.torch.tensor.ownership import Ownership
from fullshard.torch.tensor.put_off import Local
from fullshard.torch.tensor.views import leave_to_views

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Args, Kwargs], Any]
"""Carries out one operation, at least one of whose operands is a `ShardedParameter`."""


class _Rules(dict[OpOverload, Rule]):
    """The rule of each operation, decided at its first call; threads decide alike."""

    def decided_by(self, decide: Callable[[OpOverload], Rule]) -> Callable[[OpOverload], Rule]:
        """Let ``decide`` find the rule of an operation; for `fullshard.torch.tensor.rules`."""
        self._decide = decide
        return decide

    def __missing__(self, func: OpOverload) -> Rule:
        rule = self[func] = self._decide(func)
        return rule


_EVERYWHERE = "call it on every rank, and use it on one"

RULES = _Rules()
"""Rules raise `UnshardedOperationError` for operations that need more than this rank's span."""


def _refusal(name: str) -> Any:
    """Return a method that refuses what needs the memory of all elements."""

    def refuse(self: "ShardedParameter", *args: Any, **options: Any) -> NoReturn:
        """Refuse: it needs the memory of all elements."""
        raise UnshardedOperationError(
            f"{name} needs the memory of {self.ownership}. Use it on .local or .full_tensor()"
        )

    return refuse


_in_inference = torch.is_inference_mode_enabled
_make_subclass = torch.Tensor._make_wrapper_subclass


def _make(local: Tensor, ownership: Ownership, requires_grad: bool = False) -> "ShardedParameter":
    """Make a gradient or a state that is cut as its parameter is; ``local`` is not copied."""
    if _in_inference():  # of a tensor of that mode none can share the version
        with torch.inference_mode(False):
            return _make(local, ownership, requires_grad)
    made: ShardedParameter = _make_subclass(
        ShardedParameter if ownership.placed is None else ShardedDTensor,
        ownership.shape,
        dtype=local.dtype,
        device=local.device,
        requires_grad=requires_grad,
    )
    made.local = local
    made.ownership = ownership
    return made


class ShardedParameter(torch.Tensor):
    """A tensor of global shape of which this rank holds ``local``, the flat elements ``span``.

    Elementwise operations, and so optimizers, run on ``local``; norms are those of the whole
    parameter (collective); random initialisation and ``copy_`` from a tensor of the global shape
    give what one process would have. ``new_empty(size)`` and its kin give plain tensors. Operations
    that need other ranks' elements raise `UnshardedOperationError`.
    """

    local: Tensor = cast(Tensor, Local())  # each has one of its own; see [Note: Put off]
    ownership: Ownership

    # Attributes and operations go straight to C++; only real operations come back, to dispatch.
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def parameter(
        local: Tensor, ownership: Ownership, *, requires_grad: bool = True
    ) -> "ShardedParameter":
        """Make a parameter whose elements on this rank are ``local``, which is not copied."""
        made = _make(local, ownership, requires_grad)
        made._is_param = True  # what isinstance(x, nn.Parameter) looks at
        return made

    value = staticmethod(_make)

    def hold(self, local: Tensor) -> None:
        """Have the elements ``local`` from now on, which are not copied, in their dtype."""
        if local.dtype != self.dtype:
            alike = _make(local, self.ownership)
            Tensor.data.__set__(self, alike)  # type: ignore[attr-defined]
        _ = self.local  # a change of the elements so far is made before they are left
        self.local = local

    @property
    def span(self) -> Span:
        """The elements of the flattened parameter that this rank holds."""
        return self.ownership.span

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh that the parameter is sharded over, None if it was given as a group."""
        return self.ownership.device_mesh

    def to_local(self) -> Tensor:
        """Return ``local``, this rank's elements, flat; DTensors have a method of this name."""
        return self.local

    @property
    def placements(self) -> NoReturn:
        """Refuse: an interval of elements is no placement of `torch.distributed.tensor`."""
        raise AttributeError(
            f"{self.ownership}: that is no placement. Use .span and .local, or model.state_dict(), "
            "which has DTensors"
        )

    def full_tensor(self) -> Tensor:
        """Return the whole parameter as a new plain tensor. Collective.

        It is part of the graph if gradients are enabled; its gradient must be the same on all
        ranks. Raises `UsageError` on a rank that calls it alone.
        """
        what = f"full_tensor() of {self.ownership.name!r}"
        call_roll(self.ownership.comms, what, _EVERYWHERE)
        owner = self.ownership
        return _whole(self, self.gathered, lambda grad: _make(owner.cut(grad).clone(), owner))

    @torch.no_grad()
    def gathered(self) -> Tensor:
        """Do as `full_tensor`, without a roll call: for code that all ranks are known to run."""
        return self.ownership.gathered(self.local.detach())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` by its rule or, if that refuses and ranks hold rows, as DTensor does."""
        kwargs = kwargs or {}
        try:
            return RULES[func](args, kwargs)
        except UnshardedOperationError as refusal:
            return _as_dtensor_does(func, args, kwargs, refusal)

    @property
    def data(self) -> Tensor:
        """These elements without gradient; assignment copies, what was read keeps its values."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise NotSupportedError(
                f"{self.ownership}: .data is {self.dtype} on {self.device} and cannot become "
                f"{value.dtype} of shape {tuple(value.shape)} on {value.device}; convert or move "
                "the sharded module, as by model.to(...)"
            )
        if isinstance(value, ShardedParameter) and value.local.data_ptr() == self.local.data_ptr():
            return
        leave_to_views(self)
        self.detach().copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        """Copy with elements of its own; like `torch.nn.Parameter`, without ``grad``."""
        if id(self) in memo:
            known: ShardedParameter = memo[id(self)]
            return known
        made = _make(self.local.detach().clone(), self.ownership, self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __copy__(self) -> "ShardedParameter":
        made = _make(self.local, self.ownership, self.requires_grad)
        made.__dict__.update(self.__dict__)
        return made

    # torch would not come to dispatch here but follow a pointer that a wrapper has not got
    share_memory_, apply_, __dlpack__ = map(_refusal, ("share_memory_", "apply_", "__dlpack__"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: one rank's span would be saved as if it were the parameter."""
        raise UnshardedOperationError(
            f"cannot pickle {self.ownership}: other ranks' elements would be lost. Save "
            ".full_tensor(), or the whole model with fullshard.torch.save_full_weights"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        span = self.ownership.span
        return (
            f"ShardedParameter({self.ownership.name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, span=[{span.start}, {span.stop}), local={span.numel} elements)"
        )


class _Whole(torch.autograd.Function):
    """Gathers a whole tensor, whose gradient is the same on all ranks and is cut again."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gather: Callable[[], Tensor], cut: Any) -> Tensor:
        ctx.cut = cut
        return gather().detach()  # of a replicated DTensor it may be what that holds

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.cut(grad), None, None


_whole: Callable[..., Tensor] = _Whole.apply


class ShardedDTensor(ShardedParameter, DTensor):
    """A `ShardedParameter` of which ranks hold whole rows: a true DTensor.

    What a `ShardedParameter` does is done in the same way; everything else by DTensor's own
    dispatch, which may gather. Writes reach the model whichever way they come. `to_local` is
    a view of the unit's shard in the shape of this rank's rows.
    """

    __slots__ = ()  # what copies a DTensor by its slots is to find none of them: they are computed

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        return self.ownership.rows(self.local)

    @property
    def _spec(self) -> DTensorSpec:  # type: ignore[override]
        return self.ownership.spec(self.dtype)

    device_mesh = DTensor.device_mesh
    placements = DTensor.placements  # type: ignore[assignment]
    to_local = DTensor.to_local
    redistribute = DTensor.redistribute

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # torch swaps the contents of what it can take apart, as in module.to(): the unit would
        # go on with the old ones.
        raise AttributeError("__tensor_flatten__")

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole parameter as a plain tensor. Collective.

        As that of a DTensor it is part of the graph if gradients are enabled, and its gradient must
        be the same on all ranks. Raises `UsageError` on a rank that calls it alone.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return ShardedParameter.full_tensor(self)
        call_roll(self.ownership.comms, f"full_tensor() of {self.ownership.name!r}", _EVERYWHERE)
        return DTensor.full_tensor(self, grad_placements=grad_placements)

    def plain(self) -> DTensor:
        """Return a DTensor of PyTorch's own class that shares the memory."""
        return DTensor(self.local_rows(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def local_rows(self) -> Tensor:
        """Return this rank's rows without gradient: a view."""
        return self._local_tensor.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor of PyTorch's own class, with this rank's rows."""
        rows = self.local_rows().clone()  # whose storage holds nothing else: all of it is written
        made = DTensor(rows, self._spec, requires_grad=self.requires_grad)  # type: ignore[no-untyped-call]
        return made.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardedDTensor({self.ownership.name!r}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, placements={self.placements}, local_tensor={self.local_rows()})"
        )


def written_by(func: OpOverload) -> list[str | int]:
    """List the arguments that ``func`` writes to: positions, and names of keyword-only ones."""
    return [
        each.name if each.kwarg_only else position
        for position, each in enumerate(func._schema.arguments)
        if each.alias_info and each.alias_info.is_write
    ]


class DerivedDTensor(DTensor):
    """A DTensor that DTensor's own dispatch has made of a `ShardedDTensor`, or of another such.

    Operations on it are DTensor's. In backward, where sums of parameters give plain gradients that
    all ranks have, these count as replicated. ``copy_of`` is the parameter whose view it should be,
    if it is a copy instead: writes to it are refused, since they would be lost.
    """

    copy_of: str | None = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` as DTensor does, or by the rules of `ShardedDTensor`s among the operands."""
        if ShardedDTensor in types or ShardedParameter in types:
            return ShardedParameter.__torch_dispatch__(func, types, args, kwargs)
        return _as_dtensor_does(func, args, kwargs or {}, None)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, whose gradient must be the same on all ranks. Collective."""
        if grad_placements is not None:
            return DTensor.full_tensor(self, grad_placements=grad_placements)
        mesh = self.device_mesh
        gather = _own_class(self).full_tensor
        return _whole(self, gather, lambda grad: _derived(_replicated(grad, mesh), None))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a DTensor of PyTorch's own class."""
        return _own_class(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_REDUCTIONS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("amax", "amin", "count_nonzero", "linalg_vector_norm", "logsumexp", "mean", "nansum"),
        *("norm", "std", "sum", "var"),
    )
}


def _own_class(value: DTensor) -> DTensor:
    if isinstance(value, ShardedDTensor):
        return value.plain()
    return DTensor(value._local_tensor, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _as_dtensor_does(
    func: OpOverload, args: Args, kwargs: Kwargs, refusal: UnshardedOperationError | None
) -> Any:
    """Run ``func`` on DTensors that share the memory of `ShardedDTensor`s, or copy parts of them.

    Raises ``refusal``, or one like it, for what DTensor cannot do either, for plain tensors among
    the operands, for writes to views, and where no operand is a DTensor or a part of one. Errors
    of communication, and of memory that runs out, are raised as they come.
    """
    if func.overloadpacket in _REDUCTIONS:
        # With dims [] it is over all of them, which DTensor forgets: it takes that of its rows.
        every = list(range(args[0].dim()))
        args = tuple(every if isinstance(each, list) and not each else each for each in args)
    flat, rebuild = tree_flatten((args, kwargs))
    written = [args[key] if isinstance(key, int) else kwargs.get(key) for key in written_by(func)]
    refusal = refusal or UnshardedOperationError(
        f"{func}: DTensor cannot do that with what was computed from a sharded parameter and these "
        "operands. Call .full_tensor() (on every rank) first"
    )
    in_backward = torch._C._current_graph_task_id() != -1
    mesh = next((mesh for mesh in map(_mesh_of_rows, flat) if mesh is not None), None)
    if mesh is None:
        raise refusal
    taken: dict[int, DTensor] = {}
    operands: list[Any] = []
    for each in flat:
        is_part = isinstance(each, ShardedParameter) and not isinstance(each, DTensor)
        if isinstance(each, (ShardedDTensor, DerivedDTensor)):
            base = _own_class(each)
            if _is_empty_somewhere(base) and not any(each is target for target in written):
                # What has no answer for nothing would fail on that rank, and others wait for it.
                base = base.redistribute(placements=[Replicate()] * base.device_mesh.ndim)
            taken[id(base)] = each
            operands.append(base)
        elif is_part or (isinstance(each, Tensor) and each.dim() and not isinstance(each, DTensor)):
            if any(each is target for target in written) if is_part else not in_backward:
                raise refusal
            operands.append(_replicated(each.gathered() if is_part else each, mesh))
        else:
            operands.append(each)
    _refuse_to_write_to_views(func, written)
    base_args, base_kwargs = tree_unflatten(operands, rebuild)
    try:
        result = func(*base_args, **base_kwargs)
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except RuntimeError as error:  # NotImplementedError is one
        raise refusal from error
    for target in written:
        if isinstance(target, ShardedDTensor):
            torch._C._increment_version([target.local])
    viewed = args[0] if args and _gives_views(func) else None

    def handed_back(value: DTensor) -> DTensor:
        return taken[id(value)] if id(value) in taken else _derived(value, viewed)

    return tree_map_only(DTensor, handed_back, result)


def _replicated(value: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _mesh_of_rows(value: Any) -> DeviceMesh | None:
    """Return the mesh of ``value``, or of the parameter of which it is some rows, or None."""
    if isinstance(value, DTensor):
        return value.device_mesh
    return value.ownership.rows_on if isinstance(value, ShardedParameter) else None


def _is_empty_somewhere(value: DTensor) -> bool:
    """Return True if some rank holds no element of a tensor that has some."""
    cuts = zip(value.device_mesh.shape, value.placements, strict=True)
    sizes = ((size, value.shape[each.dim]) for size, each in cuts if isinstance(each, Shard))
    return any(-(-rows // size) * (size - 1) >= rows > 0 < size - 1 for size, rows in sizes)


def _gives_views(func: OpOverload) -> bool:
    return any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)


def _name_of_copied(value: DTensor, viewed: Any) -> str | None:
    """Return the parameter ``viewed``, or that it is a copy of, if ``value`` does not share it."""
    if isinstance(viewed, DerivedDTensor):
        return viewed.copy_of
    if isinstance(viewed, ShardedParameter):
        memory, own = value._local_tensor.untyped_storage(), viewed.local.untyped_storage()
        return viewed.ownership.name if memory._cdata != own._cdata else None
    return None


def _refuse_to_write_to_views(func: OpOverload, written: Sequence[Any]) -> None:
    for target in written:
        if isinstance(target, DerivedDTensor) and target.copy_of is not None:
            raise UnshardedOperationError(
                f"{func} would write to a view of parameter {target.copy_of!r}, and the change "
                "would be lost: this view of a DTensor is a copy. Write to rows (param[i:j]), to "
                "param.to_local(), or to the whole parameter by a mask or copy_()"
            )


def _derived(value: DTensor, viewed: Any) -> DTensor:
    """Return ``value`` as a `DerivedDTensor`; a sum of which each rank has a part is added up.

    Most operations in place refuse such sums. ``viewed`` is what ``value`` should be a view of.
    """
    copied = _name_of_copied(value, viewed)
    if any(placement.is_partial() for placement in value.placements):
        whole = [Replicate() if each.is_partial() else each for each in value.placements]
        value = value.redistribute(placements=whole)
    made = DerivedDTensor(value._local_tensor, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made.copy_of = copied
    return made


def _dispatch_before_dtensor() -> None:
    """Let torch 2.11 run the dispatch of `ShardedDTensor`, and not that of the class below it.

    It takes what derives from DTensor for a DTensor, whose operations it carries out in C++. Rules
    that are registered for a class come before that, each for one operation; ours are for all.
    """
    classes: tuple[Any, ...] = (ShardedDTensor, DerivedDTensor)
    own = {cls: cls.__torch_dispatch__.__func__ for cls in classes}
    registered = GenericTorchDispatchRuleHolder.find

    def find(holder: GenericTorchDispatchRuleHolder, cls: type) -> Callable[..., Any] | None:
        return own.get(cls) or registered(holder, cls)

    GenericTorchDispatchRuleHolder.find = find  # type: ignore[assignment, method-assign]


if torch.__version__ < "2.12":
    _dispatch_before_dtensor()

# Optimizers and gradient clipping choose their fast forms by looking the type up in these lists.
for _module in (torch_optimizer, _foreach_utils):
    _supported = getattr(_module, "_foreach_supported_types", None)
    if _supported is not None and ShardedParameter not in _supported:
        _supported += [ShardedParameter, ShardedDTensor]
