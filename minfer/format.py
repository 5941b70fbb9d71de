"""The storage format of a KV cache: a gate, never a guess (contract 3)."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from minfer.errors import Refusal

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Int32: TypeAlias = NDArray[np.int32]

BLOCK = 32  # elements of a q8_0 block
BLOCK_BYTES = 34  # a little-endian f16 scale, then 32 int8 codes
AUTO_F16_ELEMENTS = 8192  # n_layer * n_kv_embd from which an accelerator defaults to f16


class KvFormat(enum.Enum):
    """How one element of a cached K or V row is stored."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"

    @classmethod
    def parse(cls, text: str | KvFormat) -> KvFormat:
        """Exactly `f32`, `f16` or `q8_0`, or a format; anything else is refused (contract 3.1)."""
        for fmt in cls:
            if text in (fmt, fmt.value):
                return fmt
        raise Refusal(
            "3.1",
            f"cache type {text!r} is none of f32, f16, q8_0; "
            "leave MINFER_CACHE_TYPE and --cache-type out for the device's default",
            {"cache_type": str(text)},
        )

    def __str__(self) -> str:
        return self.value


def word(dtype: object) -> str:
    """`float32` for that type of numpy, torch or mlx."""
    return str(dtype).rpartition(".")[2]


def cell_words(fmt: KvFormat, n: int) -> int:
    """Width in f32 words of a cell of `n` elements; the only place that knows (contract 3.4)."""
    if fmt is KvFormat.F32:
        return n
    if fmt is KvFormat.F16:
        return (n + 1) // 2
    blocks = (n + BLOCK - 1) // BLOCK
    return (blocks * BLOCK_BYTES + 3) // 4


def cell_bytes(fmt: KvFormat, n: int) -> int:
    """Bytes of a cell of `n` elements: a whole number of f32 words."""
    return 4 * cell_words(fmt, n)


def resolve(
    requested: str | KvFormat | None,
    *,
    device_kind: str,
    n_layer: int,
    n_head_kv: int,
    head_dim: int,
    reads_packed_kv: bool = True,
) -> KvFormat:
    """The one format of an engine or store: asked for, or the device's default (contract 3.2).

    `requested` None or "" means auto: f32 on the CPU; on cuda and metal f16 for wide models.
    Refuses q8_0 where rows are not whole blocks or the backend cannot read packed cells.
    """
    n_kv_embd = n_head_kv * head_dim
    if not requested:
        wide = n_layer * n_kv_embd >= AUTO_F16_ELEMENTS
        return KvFormat.F16 if device_kind != "cpu" and wide else KvFormat.F32
    fmt = KvFormat.parse(requested)
    if fmt is KvFormat.Q8_0:
        facts = {"head_dim": head_dim, "n_kv_embd": n_kv_embd, "device": device_kind}
        if not reads_packed_kv:
            raise Refusal("3.3", f"{device_kind} cannot read a q8_0 cache; use f32 or f16", facts)
        refuse_odd_blocks(fmt, head_dim, n_kv_embd)
    return fmt


def refuse_odd_blocks(fmt: KvFormat, head_dim: int, n_kv_embd: int) -> None:
    """Refuse q8_0 where heads or rows are not whole blocks (contract 3.3)."""
    if fmt is KvFormat.Q8_0 and (head_dim % BLOCK or n_kv_embd % BLOCK):
        raise Refusal(
            "3.3",
            f"a q8_0 cache needs head_dim and n_kv_embd in whole blocks of {BLOCK}; here "
            f"head_dim is {head_dim} and n_kv_embd {n_kv_embd}; use f32 or f16",
            {"head_dim": head_dim, "n_kv_embd": n_kv_embd},
        )


@dataclass(frozen=True, slots=True)
class Region:
    """The K or the V cells of one layer, as one backend holds them.

    arrays: the backend's arrays. `canonical` layout: one uint8 array [n_cells, cell_bytes],
    each cell its elements in order (q8_0: 34-byte blocks), zero padded (contract 3.5).
    """

    fmt: KvFormat
    layout: str
    n_head_kv: int
    head_dim: int
    arrays: tuple[Any, ...]

    def __post_init__(self) -> None:
        sizes = (self.n_head_kv, self.head_dim)
        if any(type(n) is not int or n < 1 for n in sizes) or not self.arrays:
            raise Refusal(
                "10",
                f"a region has {len(self.arrays)} arrays and n_head_kv, head_dim {sizes}; it "
                "needs an array and whole numbers of at least 1",
                {"n_head_kv": self.n_head_kv, "head_dim": self.head_dim},
            )

    @property
    def n_cells(self) -> int:
        return int(self.arrays[0].shape[0])

    @property
    def row_elems(self) -> int:
        return self.n_head_kv * self.head_dim

    @property
    def row_words(self) -> int:
        return cell_words(self.fmt, self.row_elems)

    @property
    def row_bytes(self) -> int:
        return cell_bytes(self.fmt, self.row_elems)
