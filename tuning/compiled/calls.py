"""Small inputs of every op, of a kernel package's own arrays. What they hold does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from minfer import window
from minfer.format import BLOCK, BLOCK_BYTES, KvFormat, cell_bytes
from minfer.ops import DECODE, HALF, PREFILL, Shape
from minfer.window import WindowMode

HEADS, KV_HEADS = 8, 2  # four query heads a KV head, as in many models
CELLS = 4096
ROWS = {DECODE: (4, 512), PREFILL: (256,)}  # few rows split their keys, many do not
N_IN, N_OUT = 512, 256
Tensors = tuple[Any, ...]


@dataclass(frozen=True)
class Kit:
    """Makes the arrays of one call of n rows."""

    kernels: Any
    n: int
    fmt: KvFormat = KvFormat.F32
    head_dim: int = 128
    mode: WindowMode = WindowMode.RUNS
    kind: str = PREFILL
    block_m: int = 1

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, self.n, HEADS, KV_HEADS, self.head_dim)

    def floats(self, *shape: int) -> Any:
        return self.kernels.from_host(np.zeros(shape, np.float32))

    def ints(self, *shape: int) -> Any:
        return self.kernels.from_host(np.zeros(shape, np.int32))

    def region(self) -> Any:
        return self.kernels.empty_region(self.fmt, CELLS, KV_HEADS, self.head_dim)

    def weight(self) -> Any:
        """[N_OUT, N_IN] as files store it."""
        stored = {
            KvFormat.F32: np.zeros((N_OUT, N_IN), np.float32),
            KvFormat.F16: np.zeros((N_OUT, N_IN), np.float16),
            KvFormat.Q8_0: np.zeros((N_OUT, N_IN // BLOCK * BLOCK_BYTES), np.uint8),
        }
        return self.kernels.from_host(stored[self.fmt])

    def packed(self) -> Any:
        """Canonical q8_0 cells of N_IN elements."""
        width = cell_bytes(KvFormat.Q8_0, N_IN)
        return self.kernels.from_host(np.zeros((self.n, width), np.uint8))

    def tables(self, n: int) -> Tensors:
        return (self.floats(n, self.head_dim // 2), self.floats(n, self.head_dim // 2))

    def rows(self, heads: int) -> Any:
        return self.floats(self.n, heads, self.head_dim)


def _attention(kit: Kit) -> tuple[Tensors, dict[str, Any]]:
    sizes = {WindowMode.SPAN: (2,), WindowMode.RUNS: (window.KV_MAP_MAX_SPANS, 2)}
    seen = None if kit.mode is WindowMode.CAUSAL else kit.ints(kit.n, *sizes[kit.mode])
    tiles = kit.ints(-(-kit.n // kit.block_m) + 1, 2)
    regions = (kit.region(), kit.region())
    tensors = (kit.rows(HEADS), *regions, kit.ints(kit.n), seen, tiles)
    return tensors, {"fmt": kit.fmt, "scale": 0.1, "width": 0}


def _store(kit: Kit) -> tuple[Tensors, dict[str, Any]]:
    return (kit.region(), kit.rows(KV_HEADS), kit.ints(kit.n)), {"fmt": kit.fmt}


def _move(kit: Kit) -> tuple[Tensors, dict[str, Any]]:
    return (kit.region(), np.array([[0, 64, 640], [2048, 1024, 96]], np.int32)), {}


def _turn(kit: Kit) -> tuple[Tensors, dict[str, Any]]:
    return (kit.region(), kit.ints(kit.n), *kit.tables(1)), {"pairing": HALF}


def _fused_store(kit: Kit) -> tuple[Tensors, dict[str, Any]]:
    rows = (kit.rows(HEADS), kit.rows(KV_HEADS), kit.rows(KV_HEADS))
    places = (kit.ints(kit.n), kit.ints(kit.n))
    tensors = (*rows, kit.region(), kit.region(), *places, *kit.tables(CELLS))
    return tensors, {"fmt": kit.fmt, "pairing": HALF}


def _by_rows(n_inputs: int, **scalars: Any) -> Callable[[Kit], tuple[Tensors, dict[str, Any]]]:
    """An op of so many inputs [n, N_IN]."""
    return lambda kit: (tuple(kit.floats(kit.n, N_IN) for _ in range(n_inputs)), dict(scalars))


CALLS: dict[str, Callable[[Kit], tuple[Tensors, dict[str, Any]]]] = {
    "attn_window": _attention,
    "attn_map": _attention,
    "store_cells": _store,
    "move_cells": _move,
    "map_q8_0_cells": _turn,
    "quantize_q8_0": _by_rows(1),
    "dequantize_q8_0": lambda kit: ((kit.packed(),), {"n": N_IN}),
    "dot_q8_0": lambda kit: ((kit.packed(), kit.packed()), {"n": N_IN}),
    "matvec": lambda kit: ((kit.weight(), kit.floats(kit.n, N_IN)), {"fmt": kit.fmt}),
    "matmul": lambda kit: ((kit.weight(), kit.floats(kit.n, N_IN)), {"fmt": kit.fmt}),
    "rms_norm": lambda kit: ((kit.floats(kit.n, N_IN), kit.floats(N_IN)), {"eps": 1e-5}),
    "rope": lambda kit: (
        (kit.rows(HEADS), kit.ints(kit.n), *kit.tables(CELLS)), {"pairing": HALF}
    ),
    "silu_mul": _by_rows(2),
    "gelu_mul": _by_rows(2),
    "add": _by_rows(2),
    "scale": _by_rows(1, factor=0.5),
    "softcap": _by_rows(1, cap=30.0),
    "embed": lambda kit: ((kit.weight(), kit.ints(kit.n)), {"fmt": kit.fmt}),
    "qkv_rope_store": _fused_store,
}  # fmt: skip
