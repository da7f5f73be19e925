# SPDX-License-Identifier: Apache-2.0
"""The part of sharding that both interfaces share: checks first, then the change itself.

The interfaces (`fullshard.torch.fsdp1`, `fullshard.torch.fsdp2`) differ in who chooses the units, a
policy or the caller, and in their result, a wrapper or the module with another class.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fullshard.core.errors import ConfigurationError, NotSupportedError, UsageError
from fullshard.torch.comm.agreement import verify_agreement
from fullshard.torch.comm.ranks import Where, compute_device
from fullshard.torch.optim.checks import watch_optimizers
from fullshard.torch.sharding.find import TiedSites, find_parameters
from fullshard.torch.sharding.same_values import StartingValues, values_are_checked
from fullshard.torch.step.autograd_calls import watch_autograd
from fullshard.torch.step.managed import ManagedUnit, managed_unit_of, managed_units
from fullshard.torch.step.paths import note_left_out
from fullshard.torch.step.tracker import Tracker
from fullshard.torch.unit.changes import give_up, take_over
from fullshard.torch.unit.extensions import plain_data, resting_bytes
from fullshard.torch.unit.plan import Plan, own_value
from fullshard.torch.unit.sites import WRAPPED, ParamSites, clean_name, device_of
from fullshard.torch.unit.unit import Unit

_ASSIGNS = "_fullshard_assigns"  # a load_state_dict that runs now, with assign=True


@dataclass(frozen=True)
class ToShard:
    """The checked parameters that are to be sharded now, and the device that computes."""

    params: list[ParamSites]
    tied: list[TiedSites]
    device: torch.device

    @property
    def all_of_them(self) -> list[ParamSites]:
        """The parameters that no unit has yet, and those that units below have to give up."""
        return [*self.params, *(each.everywhere for each in self.tied)]

    def claim(self) -> list[ParamSites]:
        """Let units below give up what is used outside them; return all parameters. Collective."""
        by_owner: dict[Unit, dict[str, nn.Parameter]] = {}
        for each in self.tied:
            by_owner.setdefault(each.owner, {})[each.name_in_owner] = each.everywhere.param
        for owner, originals in by_owner.items():
            give_up(owner, originals)
        return self.all_of_them


def shardable_parameters(
    modules: Sequence[nn.Module],
    where: Where,
    ignored: AbstractSet[nn.Parameter] = frozenset(),
    device_id: int | torch.device | None = None,
) -> ToShard:
    """Find what is to be sharded of ``modules``; nothing is changed yet."""
    params, tied = find_parameters(modules, ignored)
    check_modules(modules, params)
    # A root whose parameters are all in units below computes where these do.
    below = (managed.unit.device for module in modules for managed in managed_units(module))
    device = device_of(params) or next(below, torch.device("cpu"))
    return ToShard(params, tied, compute_device(where, device, device_id))


def agree(
    units: Mapping[str, Sequence[ParamSites]],
    plans: Sequence[Plan],
    *,
    check_values: bool,
    meta_on_some: bool,
) -> bool:
    """Make sure, before anything is changed, that all ranks mean the same. Collective.

    ``units`` are the parameters of each by its name, ``plans`` what goes with them. Where
    parameters are may differ (a device; the meta device, if ``meta_on_some`` allows it), their
    values not, if ``check_values``: see `StartingValues`. One all-reduce for each communicator, if
    nothing differs.

    Returns True if a rank has parameters on the meta device. Raises `ConfigurationError` on all
    ranks if they do not agree, with the lines in which they differ, `NotSupportedError` for
    compression of what decides itself how it is gathered.
    """
    check_values = values_are_checked(check_values)
    lines = {"values": f"compared: {check_values}"}
    for (name, params), plan in zip(units.items(), plans, strict=True):
        ranks = plan.ranks
        block = ranks.block.size if ranks.block else None
        lines[f"unit {name!r}"] = (
            f"{ranks.gather.size} slices, {ranks.replicas.size} replicas, blocks of {block}, "
            f"reshard_after_forward={plan.reshard_after_forward}, {plan.precision}, "
            f"{plan.offload}, {ranks.compression}, cut by {plan.align}, values of "
            + ("each rank" if plan.values is own_value else "the first rank")
        )
        for number, each in enumerate(params):
            spec = each.spec
            trained = "trained" if spec.trainable else "frozen"
            where = f"parameter {name + '.' if name else ''}{spec.name}"
            # Ranks that registered them in another order would lay them out in that.
            lines[where] = (
                f"{spec.shape} {spec.dtype} {trained}, number {number}, cut along {spec.cut_dim}, "
                f"also as {spec.aliases}"
            ) + ("" if spec.owner is None else f", of rank {spec.owner}")
    values = StartingValues(units, plans, checked=check_values)
    comms = dict.fromkeys(c for plan in plans for c in (plan.ranks.gather, plan.ranks.replicas))
    for comm in comms:
        verify_agreement(comm, lines, plans[0].device, beside=values.digest)
    for params, plan in zip(units.values(), plans, strict=True):
        _check_compressible(params, plan)
    values.verify(meta_on_some=meta_on_some)
    return values.bare_somewhere


def _check_compressible(params: Sequence[ParamSites], plan: Plan) -> None:
    compression = plan.ranks.compression
    own = [each.spec.name for each in params if each.spec.apart]
    if own and compression is not None and compression.gather is not None:
        raise NotSupportedError(
            f"parameters with fsdp_pre_all_gather choose themselves what is gathered: {own}; give "
            "their unit a compression of reduces only (gather=None)"
        )


def shard_modules(
    modules: Sequence[nn.Module], params: Sequence[ParamSites], plan: Plan
) -> ManagedUnit:
    """Make one unit of ``params`` and let the forwards of ``modules`` drive it."""
    watch_optimizers()
    watch_autograd()
    for module in modules:
        module.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        _mark_managed(module)
    managed = ManagedUnit(modules, params, plan, Tracker.adopt)
    for module in modules:
        note_left_out(module)
    return managed


def _mark_managed(module: nn.Module) -> None:
    """Leave FSDP's mark on every module inside.

    transformers asks for it: ranks that generate then go on until the last of them has finished,
    and layers that are dropped at random run nevertheless. torch.compile asks for both.
    """
    for each in module.modules():
        each.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def _before_loading(
    module: nn.Module, state: dict[str, Any], prefix: str, about: Mapping[str, Any], *_: object
) -> None:
    module.__dict__[_ASSIGNS] = about.get("assign_to_params_buffers", False)
    managed = managed_unit_of(module)
    for each in () if managed is None else managed.unit.params:
        value = state.get(key := prefix + each.spec.name)
        if resting_bytes(each.param) and isinstance(value, Tensor) and resting_bytes(value):
            state[key] = plain_data(value)  # as one process has saved it


def _after_loading(module: nn.Module, incompatible: Any) -> None:
    """Take over what ``assign=True`` has put there, or ``to_empty`` before.

    What else a module shows a user has put there: the next forward refuses it by name. Keys that
    are missing or unexpected are named as a state dict has them, without a wrapper's part.
    """
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(f"{WRAPPED}.", "") for key in keys]
    managed = managed_unit_of(module)
    if managed is not None and (module.__dict__.pop(_ASSIGNS, False) or managed.unit.on_meta):
        take_over(managed.unit)


def take_over_below(module: nn.Module) -> None:
    """Let the units of ``module`` and below take over what modules show. See `take_over`."""
    for managed in managed_units(module):
        take_over(managed.unit)


class NotCopied:
    """The part of sharded modules' classes that refuses copies and pickles."""

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse: buffers, communicators and hooks are one rank's share of something common."""
        raise UsageError(
            f"a sharded {type(self).__name__} cannot be copied: its hooks and communicators belong "
            "to this instance. Copy the plain module before sharding, or build a second one and "
            "load this one's state dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: one rank's spans would be saved as if they were the model."""
        raise UsageError(
            f"a sharded {type(self).__name__} cannot be pickled: one rank holds a part of it. Save "
            "fullshard.torch.save_full_weights(model, path), or its state dict"
        )


def check_modules(modules: Sequence[nn.Module], params: Iterable[ParamSites]) -> None:
    """Refuse modules below ``modules`` that write to ``params`` in forward, or alias them.

    Raises:
        NotSupportedError: an embedding with ``max_norm``, a TorchScript module.
        ConfigurationError: a buffer in the memory of a parameter.
    """
    by_id = {id(each.param): each.spec.name for each in params}
    memory: dict[int, str] = {}
    for each in params:
        address = _address(each.param)
        if address:
            memory[address] = each.spec.name
    for root in modules:
        for path, module in root.named_modules():
            if isinstance(module, torch.jit.ScriptModule) and any(
                id(param) in by_id for param in module.parameters()
            ):
                raise NotSupportedError(
                    f"{clean_name(path) or '(root)'!r} is a TorchScript module, whose parameters "
                    "nobody can replace. Shard the module that it was made of, or leave it out "
                    "(ignored_modules, ignored_params)"
                )
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                _check_embedding(clean_name(path), module, by_id)
            for key, buffer in module._buffers.items():
                address = 0 if buffer is None else _address(buffer)
                if address and address in memory:
                    raise ConfigurationError(
                        f"buffer {clean_name(f'{path}.{key}' if path else key)!r} lies in the "
                        f"memory of parameter {memory[address]!r}, and would keep its first values "
                        "once that is sharded. Make it a copy (.clone()), or use the parameter"
                    )


def _check_embedding(path: str, module: nn.Module, names: dict[int, str]) -> None:
    if getattr(module, "max_norm", None) is not None and id(module.weight) in names:
        raise NotSupportedError(
            f"{type(module).__name__} {path!r} has max_norm, by which forward writes to its "
            "weight; full parameters are dropped after forward, and the change with them. Leave it "
            "out of sharding (ignored_modules, ignored_params), or bound the rows of the output"
        )


def _address(tensor: Tensor) -> int:
    """Return where a plain tensor's memory begins; 0 if it has none, or is of another class."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
