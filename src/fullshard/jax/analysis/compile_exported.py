# SPDX-License-Identifier: Apache-2.0
"""Compiles the exported program on standard input for this process's devices.

Its arguments are the sizes of the mesh's axes, and how many of the program's first arguments are
donated. Prints, as JSON, the program's memory and its text.
"""

import json
import sys

import jax
from jax import export

from fullshard.jax.elsewhere import memory_of
from fullshard.jax.mesh import create_mesh

__all__ = ["main"]


def main() -> None:
    """Compile and print; nothing is allocated."""
    data, fsdp, tensor, donated = map(int, sys.argv[1:])
    exported = export.deserialize(bytearray(sys.stdin.buffer.read()))
    mesh = create_mesh(fsdp, tensor, data)
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
    ]
    program = jax.jit(exported.call, donate_argnums=tuple(range(donated)))
    compiled = program.lower(*arguments).compile()
    print(json.dumps((memory_of(compiled), compiled.as_text())))


if __name__ == "__main__":
    main()
