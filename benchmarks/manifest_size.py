# SPDX-License-Identifier: Apache-2.0
"""The manifest of a 70B model with AdamW: its size, and the time to make and to read it.

python benchmarks/manifest_size.py --ranks 16 64 256

Every rank holds its slice of each tensor, as the engine cuts them; checksums are made up. Memory
and time grow with ranks times tensors: 256 ranks take some 2 GB of memory.
"""

import argparse
import time
from pathlib import Path

from fullshard.checkpoint.format.manifest import (
    CHUNK_BYTES,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    parse_manifest,
    render_manifest,
)
from fullshard.checkpoint.reshard import even_spans
from fullshard.core.boxes import Box

LAYERS, WIDTH, HIDDEN, VOCABULARY, KEYS = 80, 8192, 28672, 128256, 1024
HEADER_BYTES = 4096


def shapes():
    """Shape by name of each tensor: parameters, and two moments of each; all fp32."""
    block = {
        "q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH),
        "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN),
        "norm_1": (WIDTH,), "norm_2": (WIDTH,),
    }  # fmt: skip
    params = {f"layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in block.items()}
    params |= {"embed": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    kinds = ("model", "optimizer/exp_avg/model", "optimizer/exp_avg_sq/model")
    return {f"{kind}/{name}": shape for kind in kinds for name, shape in params.items()}


def manifest_of(ranks):
    """The manifest of ``ranks`` ranks that hold even rows of each tensor."""
    checksum = "0123456789abcdef" * 2
    ends = [HEADER_BYTES] * ranks
    tensors = {}
    for name, shape in shapes().items():
        row_bytes = 4 * shape[1] if len(shape) > 1 else 4
        boxes = []
        for rank, (first, stop) in enumerate(even_spans(shape[0], ranks)):
            if first < stop:
                size_bytes = (stop - first) * row_bytes
                box = Box((first, *(0 for _ in shape[1:])), (stop - first, *shape[1:]))
                sums = (checksum,) * -(-size_bytes // CHUNK_BYTES)
                boxes.append(StoredBox(box, rank, ends[rank], sums))
                ends[rank] += size_bytes
        tensors[name] = StoredTensor(shape, "F32", tuple(boxes))
    files = tuple(
        StoredFile(f"{rank:05d}.safetensors", end, HEADER_BYTES, checksum)
        for rank, end in enumerate(ends)
    )
    return Manifest(1, "0" * 32, ranks, files, tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    print("  ranks     boxes      MB  make s  read s")
    for ranks in parser.parse_args().ranks:
        manifest = manifest_of(ranks)
        begin = time.perf_counter()
        data = render_manifest(manifest)
        made = time.perf_counter()
        parse_manifest(data, Path("manifest.json"))
        read = time.perf_counter()
        boxes = sum(len(tensor.boxes) for tensor in manifest.tensors.values())
        print(
            f"{ranks:7,} {boxes:9,} {len(data) / 1e6:7.1f} {made - begin:7.2f} {read - made:7.2f}"
        )


if __name__ == "__main__":
    main()
