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
from jax.sharding import AbstractMesh, AxisType

from fullshard.core.errors import ConfigurationError
from fullshard.jax.analysis.hlo import Communication, communication_of
from fullshard.jax.arrays.mesh import Layout
from fullshard.jax.training.step import TrainStep

__all__ = ["abstract_mesh", "compile_elsewhere", "written_program"]

_COUNT = "--xla_force_host_platform_device_count"
_TIMEOUT_S = 3600


def abstract_mesh(layout: Layout, devices: int) -> AbstractMesh:
    """The same mesh without devices, its shard axis longer or shorter.

    Raises:
        ConfigurationError: if the other axes do not divide ``devices``.
    """
    sizes = layout.sizes
    others = layout.mesh.size // layout.shards
    if devices < 1 or devices % others:
        raise ConfigurationError(
            f"devices={devices} is no multiple of the {others} of the mesh's other axes"
        )
    sizes[layout.shard] = devices // others
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def written_program(step: TrainStep, batch: Any) -> str:
    """The step's program before compilation, where that may tell other dtypes than after it."""
    precision = step.options.precision
    dtypes = {
        of(each.spec.dtype)
        for each in step.placements
        for of in (precision.full_dtype, precision.grad_dtype)
    }
    return "" if dtypes <= {"float32", "float64"} else step.lowered(batch).as_text()


def compile_elsewhere(step: TrainStep, batch: Any) -> tuple[dict[str, int], Communication]:
    """Memory (as `memory_of`) and collectives of ``step``, whose mesh may be an abstract one.

    Raises:
        ConfigurationError: if the step cannot be compiled there, with what the process said.
    """
    flags = re.sub(rf"{_COUNT}=\d+", "", os.environ.get("XLA_FLAGS", ""))
    donated = len(step.specs) if step.options.donate else 0
    sizes = ",".join(f"{axis}={size}" for axis, size in step.layout.sizes.items())
    result = subprocess.run(
        [sys.executable, "-m", "fullshard.jax.analysis.compile_exported", sizes, str(donated)],
        input=bytes(_exported(step, batch).serialize()),
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} {_COUNT}={step.layout.mesh.size}",
        },
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        said = result.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigurationError(
            f"the step could not be compiled for {step.layout.mesh.size} simulated devices: "
            + " ".join(said[-1:])
        )
    memory, text = json.loads(result.stdout)
    return memory, communication_of(text, step.layout.mesh.size, written_program(step, batch))


def _exported(step: TrainStep, batch: Any) -> export.Exported:
    """The step over flat lists of arrays, with the shardings of a state before and after it."""
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=step.layout.of_batch(leaf)
        ),
        batch,
    )
    arguments = (step.abstract_state(), abstract)
    leaves, treedef = jax.tree.flatten(arguments)
    whole = step.layout.sharding()
    results = len(jax.tree.leaves(jax.eval_shape(step.function, *arguments)))
    state = [leaf.sharding for leaf in jax.tree.leaves(step.abstract_state())]

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step.function(*jax.tree.unflatten(treedef, leaves)))

    jitted = jax.jit(flat, out_shardings=[*state, *(whole,) * (results - len(state))])
    return export.export(jitted, platforms=["cpu"])(*leaves)
