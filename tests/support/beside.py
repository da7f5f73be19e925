# SPDX-License-Identifier: Apache-2.0
"""Sharded models beside plain ones: units by either interface, and whole values by name.

`torch.testing.assert_close` compares two of these dicts, None included.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.torch import FullyShardedDataParallel, fully_shard

DOORS = ("wrapper", "function")


def shard(model, comm, door="function", units=(), **options):
    """Shard ``model`` with units for the modules of the classes, or at the paths, in ``units``."""
    kinds = tuple(each for each in units if isinstance(each, type))
    chosen = [
        module
        for path, module in model.named_modules()
        if path and (path in units or isinstance(module, kinds))
    ]
    if door == "wrapper":
        where = "device_mesh" if isinstance(comm, DeviceMesh) else "process_group"
        return FullyShardedDataParallel(
            model,
            **{where: comm},
            auto_wrap_policy=lambda module, recurse, **_: recurse or module in chosen,
            **options,
        )
    for module in reversed(chosen):  # inner ones come after outer ones
        fully_shard(module, mesh=comm, **options)
    return fully_shard(model, mesh=comm, **options)


def grid(comm, within=2):
    """Split ranks, for hybrid sharding: rows share slices, columns hold equal ones."""
    row, place = divmod(comm.rank, within)
    return (
        comm.subgroup(range(row * within, (row + 1) * within)),
        comm.subgroup(range(place, comm.size, within)),
    )


def whole(value):
    """``value`` as one process has it; collective if it is sharded."""
    if value is None:
        return None
    return getattr(value, "full_tensor", lambda: value)().detach()


def params_of(model: nn.Module):
    """The whole parameters by name."""
    return {name: whole(param) for name, param in model.named_parameters()}


def grads_of(model: nn.Module):
    """The whole gradients by name; None where there is none."""
    return {name: whole(param.grad) for name, param in model.named_parameters()}
