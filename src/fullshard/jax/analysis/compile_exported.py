# SPDX-License-Identifier: Apache-2.0
"""Compiles the exported program on standard input for this process's devices.

Its arguments are the mesh's axes, as ``data=1,fsdp=8``, and how many of the program's first
arguments are donated. Prints, as JSON, the program's memory and its text.
"""

import json
import sys

import jax
from jax import export
from jax.sharding import AxisType

from fullshard.jax.analysis.hlo import memory_of

__all__ = ["main"]


def main() -> None:
    """Compile and print; nothing is allocated."""
    sizes = dict(each.split("=") for each in sys.argv[1].split(","))
    donated = int(sys.argv[2])
    exported = export.deserialize(bytearray(sys.stdin.buffer.read()))
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(map(int, sizes.values())), tuple(sizes), axis_types=kinds)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    program = jax.jit(exported.call, donate_argnums=tuple(range(donated)))
    compiled = program.lower(*arguments).compile()
    print(json.dumps((memory_of(compiled), compiled.as_text())))


if __name__ == "__main__":
    main()
