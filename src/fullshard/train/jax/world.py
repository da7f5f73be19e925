# SPDX-License-Identifier: Apache-2.0
"""The devices of a run on the JAX engine."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from fullshard.jax.checkpoint import process_ranks
from fullshard.train.run import World

__all__ = ["DeviceWorld", "device_stats"]


def device_stats() -> dict[str, int]:
    """Return what this process's first device tells of its memory; empty if it tells nothing."""
    return jax.local_devices()[0].memory_stats() or {}


class DeviceWorld(World):
    """The devices of ``mesh``, over all processes.

    One process drives all its devices, so that a step takes the whole batch: what the ranks of the
    torch engine would take, one behind the other.
    """

    noun = "device"
    part: tuple[int, int] = (0, 1)

    def __init__(self, mesh: Mesh):
        self.size: int = int(mesh.devices.size)
        self.is_first: bool = jax.process_index() == 0
        self.driver: str = mesh.devices.flat[0].device_kind
        processes, cpu = jax.process_count(), mesh.devices.flat[0].platform == "cpu"
        self.name: str = f"{self.size} {'CPU devices' if cpu else self.driver}"
        if processes > 1:
            self.name += f" of {processes} processes"
        elif cpu:
            self.name = f"{self.size} simulated CPU devices"
        self.where: str = self.name

    def device_memory(self) -> tuple[int, int] | None:
        """See `World.device_memory`."""
        stats = device_stats()
        if "peak_bytes_in_use" in stats and "bytes_limit" in stats:
            return stats["peak_bytes_in_use"], stats["bytes_limit"]
        return None

    def somewhere(self, *flags: bool) -> tuple[bool, ...]:
        """See `World.somewhere`."""
        if jax.process_count() == 1:
            return flags
        return tuple(multihost_utils.process_allgather(np.array(flags)).any(axis=0).tolist())

    def shared_text(self, text: str) -> str:
        """See `World.shared_text`."""
        return process_ranks().broadcast(text.encode()).decode()
