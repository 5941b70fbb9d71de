"""The fingerprint of a model: which file's weights a saved cache belongs to (contract 8.8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from minfer.format import Bytes
from minfer.models.gguf import GgufFile
from minfer.models.keys import architecture_of

BLOCK = 4 << 10  # bytes of a sample
LARGE, STRIDED = 16 << 20, 64  # of tensors above so many bytes, so many more samples
AT_ONCE = 16 << 20  # bytes, where all are hashed


def fingerprint(file: GgufFile) -> bytes:
    """xxh3-128, 16 bytes: of metadata that changes numbers, the tensor table, and samples.

    Samples are 4 KiB from start, middle and end of every tensor, and 64 blocks at equal strides of
    each above 16 MiB: a file that differs elsewhere only is not told apart; `full` reads it all.
    """
    hashed = _of_tables(file)
    for name in file.tensor_names:
        data = _bytes(file, name)
        for first in _samples(len(data)):
            hashed.update(data[first : first + BLOCK].tobytes())
    return bytes(hashed.digest())


def full(file: GgufFile, progress: bool = False) -> bytes:
    """xxh3-128 of the same tables and of every byte of every tensor. progress: a bar on stderr."""
    from tqdm import tqdm

    hashed, sizes = _of_tables(file), {n: len(_bytes(file, n)) for n in file.tensor_names}
    bar = tqdm(
        total=sum(sizes.values()),
        desc="hashing",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not progress,
    )
    with bar:
        for name, size in sizes.items():
            data = _bytes(file, name)
            for first in range(0, size, AT_ONCE):
                some = data[first : first + AT_ONCE]
                hashed.update(some.data)
                bar.update(len(some))
    return bytes(hashed.digest())


def _of_tables(file: GgufFile) -> Any:
    """A hash that has seen the metadata of the architecture, and every tensor's name and shape."""
    import xxhash

    architecture = architecture_of(file)
    keys = ("general.architecture", f"{architecture}.")
    metadata = {k: v for k, v in sorted(file.metadata.items()) if k.startswith(keys)}
    tensors = [(name, *file.tensor_info(name)) for name in file.tensor_names]
    return xxhash.xxh3_128(json.dumps([metadata, tensors], default=str).encode())


def _bytes(file: GgufFile, name: str) -> Bytes:
    """A tensor as bytes, a view of the file."""
    return np.ascontiguousarray(file.stored(name)).reshape(-1).view(np.uint8)


def _samples(size: int) -> Iterator[int]:
    """Where samples begin in a tensor of `size` bytes."""
    last = max(0, size - BLOCK)
    yield from sorted({0, last // 2, last})
    if size > LARGE:
        yield from (last * k // STRIDED for k in range(STRIDED))
