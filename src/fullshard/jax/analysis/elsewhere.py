# SPDX-License-Identifier: Apache-2.0
"""A step compiled for another number of devices than there are here, in a process of its own.

The step is traced for a mesh without devices, exported as StableHLO, and compiled by a Python
process that simulates as many CPU devices. Neither allocates anything.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fullshard.core.errors import ConfigurationError
from fullshard.jax.collectives import Communication, communication_of, written_program
from fullshard.jax.mesh import AXES
from fullshard.jax.program import batch_sharding
from fullshard.jax.step import TrainStep

__all__ = ["abstract_mesh", "compile_elsewhere", "memory_of"]

_COUNT = "--xla_force_host_platform_device_count"
_TIMEOUT_S = 3600


def abstract_mesh(data: int, fsdp: int, tensor: int) -> AbstractMesh:
    """A mesh of these sizes without devices."""
    return AbstractMesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compile_elsewhere(step: TrainStep, batch: Any) -> tuple[dict[str, int], Communication]:
    """Memory (as `memory_of`) and collectives of ``step``, whose mesh may be an abstract one.

    Raises:
        ConfigurationError: if the step cannot be compiled there, with what the process said.
    """
    flags = re.sub(rf"{_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    step.lowered(batch)  # settles how the model is used, which exporting does not
    donated = len(jax.tree.leaves(step.abstract_state())) if step.options.donate else 0
    sizes = (*step.mesh.shape.values(), donated)
    result = subprocess.run(
        [sys.executable, "-m", "fullshard.jax.compile_exported", *map(str, sizes)],
        input=bytes(_exported(step, batch).serialize()),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} {_COUNT}={step.mesh.size}",
        },
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigurationError(
            f"the step could not be compiled for {step.mesh.size} simulated devices: "
            + " ".join(said[-1:])
        )
    memory, text = json.loads(result.stdout)
    return memory, communication_of(text, step.mesh.size, written_program(step, batch))


def _exported(step: TrainStep, batch: Any) -> export.Exported:
    """The step over flat lists of arrays, with the shardings of a state before and after it."""
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=batch_sharding(step.mesh, leaf)
        ),
        batch,
    )
    arguments = (step.abstract_state(), abstract)
    leaves, treedef = jax.tree.flatten(arguments)
    whole = NamedSharding(step.mesh, PartitionSpec())
    results = len(jax.tree.leaves(jax.eval_shape(step.function, *arguments)))
    state = [leaf.sharding for leaf in jax.tree.leaves(step.abstract_state())]

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step.function(*jax.tree.unflatten(treedef, leaves)))

    jitted = jax.jit(flat, out_shardings=[*state, *(whole,) * (results - len(state))])
    return export.export(jitted, platforms=["cpu"])(*leaves)


def memory_of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """A compiled program's arguments, temporary memory and peak, in bytes on each device.

    The peak is everything that the program's buffers take; ``peak_memory_in_bytes`` leaves
    temporary ones out on CPUs.
    """
    memory: Any = compiled.memory_analysis()
    apart = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "peak": memory.argument_size_in_bytes + apart + memory.temp_size_in_bytes,
    }
