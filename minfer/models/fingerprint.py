"""The fingerprint of a model: which file's weights a saved cache belongs to (contract 8.8)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from minfer.models.gguf import GgufFile
from minfer.models.keys import architecture_of

SAMPLE = 4 << 10  # bytes
LARGE, STRIDED = 16 << 20, 64  # of tensors above so many bytes, so many more samples
AT_ONCE = 4 << 20  # bytes, where all are hashed


def fingerprint(file: GgufFile) -> bytes:
    """xxh3-128, 16 bytes: of metadata that changes numbers, the tensor table, and samples.

    Samples are 4 KiB from start, middle and end of every tensor, and 64 blocks at equal strides of
    each above 16 MiB. A file that differs elsewhere only is not told apart; `full_hash` reads all.
    """
    hashed = _of_tables(file)
    with _opened(file.path) as data:
        for name in file.tensor_names:
            start, size = file.extent(name)
            for first in _samples(size):
                data.seek(start + first)
                hashed.update(data.read(min(SAMPLE, size)))
    return bytes(hashed.digest())


def full_hash(file: GgufFile, progress: bool = False) -> bytes:
    """xxh3-128 of the same tables and of every byte of every tensor. progress: a bar on stderr.

    Refuses a file that is not as it was when `file` was opened.
    """
    from tqdm import tqdm

    file.refuse_changed()
    hashed, extents = _of_tables(file), [file.extent(name) for name in file.tensor_names]
    bar = tqdm(
        total=sum(size for _, size in extents),
        desc="hashing",
        unit="B",
        unit_scale=True,
        disable=not progress,
        leave=False,
    )
    buffer = memoryview(bytearray(AT_ONCE))
    with bar, _opened(file.path) as data:
        for start, size in extents:
            data.seek(start)
            for first in range(0, size, AT_ONCE):
                some = buffer[: min(AT_ONCE, size - first)]
                data.readinto(some)
                hashed.update(some)
                bar.update(len(some))
    file.refuse_changed()
    return bytes(hashed.digest())


def _opened(path: Path) -> FileIO:
    # Not the map: a file that another program cuts short would end this one.
    return path.open("rb", buffering=0)


def _of_tables(file: GgufFile) -> Any:
    """A hash that has seen the metadata of the architecture, and every tensor's name and shape."""
    import xxhash

    architecture = architecture_of(file)
    keys = ("general.architecture", f"{architecture}.")
    metadata = {k: v for k, v in sorted(file.metadata.items()) if k.startswith(keys)}
    tensors = [(name, *file.tensor_info(name)) for name in file.tensor_names]
    return xxhash.xxh3_128(json.dumps([metadata, tensors], default=str).encode())


def _samples(size: int) -> Iterator[int]:
    """Where samples begin in a tensor of `size` bytes."""
    last = max(0, size - SAMPLE)
    yield from sorted({0, last // 2, last})
    if size > LARGE:
        yield from (last * k // STRIDED for k in range(STRIDED))
