# SPDX-License-Identifier: Apache-2.0
"""The interface of FSDP1: a module that wraps another one and what a policy picks inside it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.nn.utils import clip_grad_norm_

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.core.strategy import ShardingStrategy
from fullshard.torch.comm.compressed import CommunicationCompression
from fullshard.torch.comm.ranks import Where
from fullshard.torch.fsdp1.flat_params import FlatHandles, mark_flattened
from fullshard.torch.fsdp1.optim_state_dicts import OptimizerStateDicts
from fullshard.torch.fsdp1.state_dicts import wrappers_in
from fullshard.torch.fsdp1.units import (
    UnitOptions,
    in_full_precision,
    members_by_name,
    parameters_by_module,
)
from fullshard.torch.optim.original_params import switch_optimizers
from fullshard.torch.sharding.auto_wrap import auto_wrap_policy
from fullshard.torch.sharding.find import ignored_parts
from fullshard.torch.sharding.initialisation import broadcast_buffers, initialise
from fullshard.torch.sharding.module_buffers import cast_buffers, move_buffers
from fullshard.torch.sharding.options import CPUOffload, MixedPrecision
from fullshard.torch.sharding.owners import AlignOrMatrix, is_matrix, matrices_owned, tables_of
from fullshard.torch.sharding.settings import mark_optional, require_gradient_sync, set_prefetch
from fullshard.torch.sharding.shard import NotCopied, agree, shard_modules, shardable_parameters
from fullshard.torch.sharding.summon import summon_full_params
from fullshard.torch.step.managed import managed_unit_of, managed_units
from fullshard.torch.unit.changes import LOW_PRECISION, follow_conversion
from fullshard.torch.unit.plan import Plan
from fullshard.torch.unit.sites import WRAPPED, ParamSites, clean_name
from fullshard.wrap import modules_to_wrap


class _OptionClasses:
    """FSDP1's options as attributes of its wrapper class: ``FSDP.ShardingStrategy.FULL_SHARD``."""

    ShardingStrategy = ShardingStrategy
    BackwardPrefetch = BackwardPrefetch
    CPUOffload = CPUOffload
    MixedPrecision = MixedPrecision


class FullyShardedDataParallel(
    NotCopied, OptimizerStateDicts, FlatHandles, _OptionClasses, nn.Module
):
    """Wraps a module whose parameters are sharded as one unit; FSDP1's signature.

    With an ``auto_wrap_policy`` the submodules that it picks are wrapped too, each a unit of its
    own. Construction is collective over the ranks of ``process_group``; every rank must hold the
    same values. Calls, attributes and items pass through to the wrapped module; names of
    parameters, buffers and state dict entries are those of the plain model.

    Args:
        module: the module to shard; its parameters must be on one device.
        process_group: the ranks to shard over (a 1-D ``DeviceMesh`` is taken too); None is the
            default group, initialised from a launcher's environment if need be. For hybrid
            strategies a pair: ranks that share slices, ranks that hold equal ones; None shares
            slices within each host.
        sharding_strategy: FULL_SHARD if None.
        cpu_offload: see `CPUOffload`.
        auto_wrap_policy: see `fullshard.wrap`; "auto" lets the planner choose.
        backward_prefetch: BACKWARD_PRE gathers one unit ahead in backward, others none. A
            `CustomPolicy` may choose it for each unit: what is gathered while that one runs.
        mixed_precision: see `MixedPrecision`.
        ignored_modules: modules whose parameters stay as they are, on every rank, and whose
            gradients are not reduced.
        param_init_fn: called with each module that has parameters on the meta device, unit by unit,
            to give it memory and values; without it their ``reset_parameters()`` is called.
        device_id: where the shards shall live; a number is that of a GPU. Parameters on the CPU go
            there span by span, never as a whole.
        sync_module_states: take parameters and buffers from the first rank before sharding; other
            ranks may have the module on the meta device.
        forward_prefetch: one unit is always gathered ahead in forward; True gathers two.
        limit_all_gathers: no effect; the schedule always bounds how much is gathered ahead.
        use_orig_params: let optimizers that were created before go on with the sharded
            parameters. Original names and shapes are always kept.
        ignored_states: as ``ignored_modules``, but may hold parameters too.
        device_mesh: a 1-D mesh, or (replicate, shard) in 2-D, instead of ``process_group``.
        compression: see `CommunicationCompression`; not part of FSDP1.
        check_values: compare the values that ranks start with. Not part of FSDP1.
        optional_modules: modules inside that ranks may leave out of a forward: see
            `mark_optional`. They, or modules inside, are units. Not part of FSDP1.
        align: cut parameters anywhere, or at rows ("row") as DTensors, or ("matrix") leave each
            matrix on one rank, for optimizers like Muon; embeddings, and what is no matrix, are cut
            anywhere. A policy may choose for each unit. Not part of FSDP1.

    Raises:
        ConfigurationError: if parameters are on several devices, a policy returns something
            unknown, ``process_group`` is not a process group, or ranks start with different values
            (nothing is changed then); or if a parameter on the meta device is never initialised.
        UsageError: if there is neither a process group nor a launcher's environment.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Where = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        compression: CommunicationCompression | None = None,
        check_values: bool = True,
        align: AlignOrMatrix = "element",
        optional_modules: Iterable[nn.Module] = (),
    ):
        super().__init__()
        _check_wrappable(module)
        if process_group is not None and device_mesh is not None:
            raise ConfigurationError("pass process_group or device_mesh, not both")
        where = process_group if device_mesh is None else device_mesh
        of_all = UnitOptions(
            where,
            sharding_strategy,
            cpu_offload,
            mixed_precision,
            compression,
            backward_prefetch,
            forward_prefetch,
            align,
        )
        by_name = {"ignored_modules": ignored_modules, "ignored_states": ignored_states}
        ignored, ignored_params = ignored_parts(by_name)
        chosen = _modules_below(module, auto_wrap_policy, mixed_precision, ignored) | {module: {}}
        options = {each: of_all.chosen_for(each, its_own) for each, its_own in chosen.items()}
        found = shardable_parameters([module], where, ignored_params, device_id)
        plans = {m: own.plan(found.device, sync_module_states) for m, own in options.items()}
        members = parameters_by_module(module, chosen, found.all_of_them)
        members = _owned(module, members, options, plans)
        named = members_by_name(module, members)
        agree(named, list(plans.values()), check_values=check_values, meta_on_some=False)
        found.claim()  # from here on things change
        move_buffers(module, found.device)
        self._wrap_all(module, plans, members, param_init_fn, not sync_module_states)
        _cast_buffers(module, mixed_precision, with_policy=auto_wrap_policy is not None)
        self._note_choices(options, plans, optional_modules)
        if not use_orig_params:
            mark_flattened(each.shown for each in found.all_of_them)
        else:
            successors = [(ref(each.param), each.shown) for each in found.all_of_them]
            del found, members, named  # whoever holds the originals now is somebody else
            switch_optimizers(successors)

    def _note_choices(
        self,
        options: Mapping[nn.Module, UnitOptions],
        plans: Mapping[nn.Module, Plan],
        optional_modules: Iterable[nn.Module],
    ) -> None:
        forward = 2 if options[self.module].forward_prefetch else 1
        backward = int(any(each.prefetches_backward for each in options.values()))
        set_prefetch(self, forward, backward)
        for wrapper in self.fsdp_modules(self):
            if (module := wrapper.module) in plans:  # not wrapped by hand before
                wrapper.__dict__.update(options[module].attributes(plans[module]))
                managed = managed_unit_of(wrapper)
                if managed is not None and not options[module].prefetches_backward:
                    managed.change("prefetch_backward", [])
        around = {wrapper.module: wrapper for wrapper in self.fsdp_modules(self)}
        mark_optional(*(around.get(module, module) for module in optional_modules))

    def _wrap_all(
        self,
        root: nn.Module,
        plans: Mapping[nn.Module, Plan],
        members: Mapping[nn.Module, Sequence[ParamSites]],
        param_init_fn: Callable[[nn.Module], None] | None,
        each_rank_initialises: bool,
    ) -> None:
        for module, plan in plans.items():
            wrapper = self if module is root else FullyShardedDataParallel.__new__(type(self))
            params = members[module]
            if plan.ranks.first or each_rank_initialises:
                params = initialise([module], params, plan.device, param_init_fn)
            nn.Module.__init__(wrapper)
            setattr(wrapper, WRAPPED, module)
            add_prefix: Any = wrapper.register_load_state_dict_pre_hook  # has no types
            add_prefix(_add_wrapped_to_keys)
            shard_modules([wrapper], params, plan)
            if wrapper is not self:
                _replace_module(root, module, wrapper)
        if not each_rank_initialises:
            broadcast_buffers([root], plans[root].ranks, plans[root].device)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        wrapped = self._modules[WRAPPED]
        assert wrapped is not None
        return wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward; its parameters are gathered by then."""
        return self.module(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        fn = follow_conversion((managed.unit for managed in managed_units(self)), fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("_modules", {}).get(WRAPPED)
        for tensors in () if wrapped is None else (wrapped._parameters, wrapped._buffers):
            if name in tensors and isinstance(value, Tensor):
                tensors[name] = value  # as `functional_call` shows it, by the plain model's name
                return
        super().__setattr__(name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the names of the plain model, and so parameters and buffers too.

        A wrapper comes before the module in it, under the same name.
        """
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield clean_name(name, compiled=True), module

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``.

        Returns the norm before clipping, the same on every rank. As FSDP1 does, it is taken in
        float32 also of gradients of lower precision. Collective.
        """
        grads = [param.grad for param in self.parameters() if param.grad is not None]
        if all(grad.dtype not in LOW_PRECISION for grad in grads):
            norm = clip_grad_norm_(self.parameters(), max_norm, norm_type)
        else:
            norm = _clip_in_float32(grads, max_norm, norm_type)
        return norm.as_subclass(Tensor)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let forward and backward add gradients up without communication, within a ``with``.

        They stay full on every rank, which costs their memory; the first backward outside reduces
        the sum. Until then ``.grad`` has none of it. All ranks must do the same.
        """
        require_gradient_sync(self, False)
        try:
            yield
        finally:
            require_gradient_sync(self, True)

    summon_full_params = staticmethod(summon_full_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call ``fn`` on every submodule with full parameters shown, and keep what it writes."""
        with summon_full_params(self, recurse=False):  # wrappers below do it for theirs
            super().apply(fn)
        return self

    def check_is_root(self) -> bool:
        """Return True unless a wrapper around this one is known to run it. Changes nothing."""
        return self._is_root

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients by ``hook``, once, for all units below.

        It is called as ``hook(state, full, shard)`` with flat 1-D tensors of the reduce dtype and
        puts the averaged slice into ``shard``; with NO_SHARD as ``hook(state, full)``, averaging in
        place. `torch.distributed.algorithms._comm_hooks.default_hooks` fit.
        """
        units = [managed.unit for managed in managed_units(self)]
        for unit in units:
            unit.refuse_unequal("register_comm_hook")
            if unit.settings.hook is not None:
                raise UsageError(f"unit {unit.name!r} has a communication hook already")
            if unit.ranks.gather.size > 1 and unit.ranks.replicas.size > 1:
                raise NotSupportedError("communication hooks do not go with hybrid sharding")
        for unit in units:
            sharded = unit.ranks.gather.size > 1
            unit.settings.hook = (
                partial(hook, state) if sharded else lambda full, _: hook(state, full)
            )

    @staticmethod
    def fsdp_modules(
        module: nn.Module, root_only: bool = False
    ) -> "list[FullyShardedDataParallel]":
        """The wrappers in ``module``, itself included; ``root_only``: only outermost ones."""
        return wrappers_in(module, FullyShardedDataParallel, root_only=root_only)


def _clip_in_float32(grads: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    norms = torch._foreach_norm(grads, norm_type, torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(coefficient.to(grad.device, grad.dtype))
    norm_in_dtype: Tensor = norm.to(reduce(torch.promote_types, [grad.dtype for grad in grads]))
    return norm_in_dtype


def _check_wrappable(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"expected a module to wrap, got {type(module).__name__}")
    if managed_unit_of(module) is not None:
        raise UsageError(f"this {type(module).__name__} is sharded already")


def _modules_below(
    root: nn.Module, policy: Any, precision: MixedPrecision | None, ignored: set[nn.Module]
) -> dict[nn.Module, dict[str, Any]]:
    """The modules below ``root`` that become units, with what is different about each."""
    if policy is None:
        return {}
    _check_nothing_is_sharded(root)
    if policy == "auto":
        policy = auto_wrap_policy(root, ignored)
    apart = in_full_precision(root, precision, ignored)
    chosen = {**apart, **modules_to_wrap(root, policy, ignored)}
    chosen |= {module: {**chosen[module], **options} for module, options in apart.items()}
    # What torch.compile(module) returns calls that very module, whatever takes its place below.
    compiled = {m._modules["_orig_mod"]: m for m in root.modules() if "_orig_mod" in m._modules}
    return {compiled.get(module, module): options for module, options in chosen.items()}


def _check_nothing_is_sharded(root: nn.Module) -> None:
    for path, module in root.named_modules():
        if managed_unit_of(module) is not None:
            raise ConfigurationError(
                f"auto_wrap_policy needs a module without sharded ones in it, but {path!r} is "
                "sharded already; leave the choice to the policy, or wrap by hand without one"
            )


def _cast_buffers(
    module: nn.Module, precision: MixedPrecision | None, *, with_policy: bool
) -> None:
    if precision is not None and precision.buffer_dtype is not None:
        # With a policy they are units in full precision, see `in_full_precision`.
        apart = precision._module_classes_to_ignore if with_policy else ()
        cast_buffers(module, precision.buffer_dtype, except_for=apart)


def _replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever a module below ``root`` holds ``old``."""
    for module in list(root.modules()):
        if module is not new:
            for name, child in module._modules.items():
                if child is old:
                    module._modules[name] = new


def _add_wrapped_to_keys(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Before a wrapper loads: the plain model's ``x`` is ``_fsdp_wrapped_module.x`` here."""
    for key in [key for key in state if key.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(f"{WRAPPED}."):
            state[f"{prefix}{WRAPPED}.{rest}"] = state.pop(key)


def _owned(
    root: nn.Module,
    members: Mapping[nn.Module, list[ParamSites]],
    options: Mapping[nn.Module, UnitOptions],
    plans: Mapping[nn.Module, Plan],
) -> dict[nn.Module, list[ParamSites]]:
    """Give the matrices of units that keep them whole to ranks, all together."""
    tables = tables_of(root)
    whole = {module for module, each in options.items() if each.align == "matrix"}
    units = [(params, plans[module].ranks) for module, params in members.items() if module in whole]
    owned = iter(matrices_owned(units, lambda each: is_matrix(each, tables)))
    return {
        module: next(owned) if module in whole else list(params)
        for module, params in members.items()
    }
