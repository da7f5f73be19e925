# SPDX-License-Identifier: Apache-2.0
"""Meshes, the part that each of their axes has, and several processes joined into one.

Along ``data`` and ``fsdp`` the batch is cut, along ``fsdp`` parameters, along ``tensor`` a second
dimension of those that a rule names.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.launchers import launcher_environment

AXES = ("data", "fsdp", "tensor")
_log = logging.getLogger(__name__)

Axis = str | tuple[str, ...] | None
"""The cut of one dimension: by an axis of the mesh, several, or none."""


@dataclass(frozen=True)
class MeshAxes:
    """A mesh, and the use of its axes: ``shard`` cuts parameters, ``batch`` examples."""

    mesh: Mesh | AbstractMesh
    shard: str
    batch: tuple[str, ...]

    @property
    def shards(self) -> int:
        """Devices along the shard axis."""
        return self.count(self.shard)

    @property
    def parts(self) -> int:
        """The number of parts into which a batch is cut."""
        return self.count(self.batch)

    @property
    def only_batch(self) -> bool:
        """True if the batch is cut along every axis that has more than one device."""
        return self.parts == self.mesh.size

    def weight(self, dim: int) -> PartitionSpec:
        """The spec in `jax.shard_map` of a weight that the shard axis cuts along ``dim``.

        Over an axis that is left out XLA sums, so those of one device are named.
        """
        return PartitionSpec(*(None,) * dim, (self.shard, *self._of_one))

    def examples(self, dim: int = 0) -> PartitionSpec:
        """The spec in `jax.shard_map` of an array whose dimension ``dim`` is examples."""
        return PartitionSpec(*(None,) * dim, tuple(dict.fromkeys((*self.batch, *self._of_one))))

    @property
    def _of_one(self) -> list[str]:
        return [name for name, k in self.mesh.shape.items() if k == 1 and name != self.shard]

    @property
    def shard_map(self) -> Any:
        """`jax.shard_map` over this mesh."""
        return functools.partial(jax.shard_map, mesh=self.mesh, check_vma=False)

    def count(self, axis: Axis) -> int:
        """The number of parts into which this cuts a dimension."""
        return math.prod(self.mesh.shape[name] for name in axis_names(axis))

    def sharding(self, *axes: Axis) -> NamedSharding:
        """The sharding of arrays whose dimensions these axes cut; of none, that of whole ones."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def axis_names(axis: Axis) -> tuple[str, ...]:
    """The axes of the mesh that cut one dimension."""
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


def read_mesh(
    mesh: Mesh | AbstractMesh, shard: str | None = None, batch: Sequence[str] | None = None
) -> MeshAxes:
    """Read from their names what the axes of ``mesh`` are for, unless it is said.

    The shard axis is "fsdp", or the only axis that there is. The batch is cut along "data" and the
    shard axis. Explicit axes, as ``jax.make_mesh`` makes them, are taken as Auto: ordinary models
    need that. Raises `ConfigurationError` if that is undecided, or for a name that is no axis.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ConfigurationError(
            f"expected a jax.sharding.Mesh, as create_mesh() makes, got {type(mesh).__name__}"
        )
    names = tuple(mesh.axis_names)
    if shard is None:
        shard = "fsdp" if "fsdp" in names else names[0] if len(names) == 1 else None
    if shard is None:
        raise ConfigurationError(
            f"the mesh has axes {names}: say which one cuts parameters, as shard_axis={names[0]!r}"
        )
    chosen = tuple(n for n in names if n in ("data", shard)) if batch is None else tuple(batch)
    for name in (shard, *chosen):
        if name not in names:
            raise ConfigurationError(f"{name!r} is no axis of the mesh, which has {names}")
    if any(kind is not AxisType.Auto for kind in mesh.axis_types):
        auto = (AxisType.Auto,) * len(names)
        of = mesh.devices if isinstance(mesh, Mesh) else tuple(mesh.shape.values())
        mesh = type(mesh)(of, names, axis_types=auto)  # type: ignore[arg-type]
    return MeshAxes(mesh, shard, chosen)


def create_mesh(
    fsdp: int | None = None,
    tensor: int = 1,
    data: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of ``data`` x ``fsdp`` x ``tensor`` devices, with those axis names, all of type Auto.

    ``fsdp`` is what the others leave if it is None. Fewer devices than there are may be asked for:
    the first ones are taken, and the log says so. Raises `ConfigurationError` for sizes that the
    devices do not give.
    """
    there = list(jax.devices() if devices is None else devices)
    for axis, size in zip(AXES, (data, fsdp, tensor), strict=True):
        if size is not None and size < 1:
            raise ConfigurationError(f"mesh axis {axis!r} needs at least 1 device, got {size}")
    if fsdp is None:
        fsdp, rest = divmod(len(there), data * tensor)
        if rest or fsdp == 0:
            raise ConfigurationError(
                f"data={data} x tensor={tensor} does not divide {_devices_text(there)}: "
                "give fsdp= to use a part of them"
            )
    wanted = data * fsdp * tensor
    if wanted > len(there):
        raise ConfigurationError(
            f"a mesh of data={data} x fsdp={fsdp} x tensor={tensor} needs {wanted} devices, there "
            f"are {_devices_text(there)}; on a CPU, XLA_FLAGS="
            f"--xla_force_host_platform_device_count={wanted} before JAX is loaded makes more"
        )
    if wanted < len(there) and jax.process_count() > 1 and devices is None:
        raise ConfigurationError(
            f"a mesh of {wanted} devices would leave some of the {_devices_text(there)} of "
            f"{jax.process_count()} processes out: use all, or name them with devices="
        )
    grid = np.array(there[:wanted]).reshape(data, fsdp, tensor)
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    _log.info("%s; %d devices stay idle", describe_mesh(mesh), len(there) - wanted)
    return mesh


def describe_mesh(mesh: Mesh) -> str:
    """One line: devices, their kind, processes, and the size of each axis."""
    devices = list(mesh.devices.flat)
    sizes = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    processes = len({device.process_index for device in devices})
    return f"mesh {sizes} over {_devices_text(devices)} of {processes} process(es)"


def initialize() -> bool:
    """Join the processes of a launcher, each with its devices; before any other use of JAX.

    Every process must call it. A launcher (torchrun, Open MPI, SLURM) says in the environment who
    is who; where there is none nothing is joined and False is returned: call
    ``jax.distributed.initialize`` then, which this does. On CPUs collectives run over Gloo. Raises
    `ConfigurationError` if the launcher's variables contradict each other.
    """
    launched = launcher_environment(os.environ)
    if launched is None:
        return False
    said = {**os.environ, **launched}
    port = int(said["MASTER_PORT"])
    if "TORCHELASTIC_RUN_ID" in said:  # torchrun itself listens there
        port += 1 if port < 65_535 else -1
    address, size, rank = f"{said['MASTER_ADDR']}:{port}", said["WORLD_SIZE"], said["RANK"]
    jax.distributed.initialize(address, int(size), int(rank), devices_of_process(said))
    return True


def devices_of_process(environ: Mapping[str, str]) -> list[int] | None:
    """Choose the accelerators of its host that this process takes; None: all that it can see.

    Where a launcher has started several processes on a host, each takes the one of its number,
    unless it has been shown a part of them only.
    """
    local, beside = environ.get("LOCAL_RANK"), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if local is None or beside == 1 or (shown is not None and len(shown.split(",")) < beside):
        return None
    return [int(local)]


def _devices_text(devices: Sequence[jax.Device]) -> str:
    kinds = sorted({device.device_kind for device in devices})
    return f"{len(devices)} device(s) ({', '.join(kinds) or 'none'})"
