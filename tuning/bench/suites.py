"""The cases that the benchmark runs, by suite: full sizes, and tiny ones for a smoke test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuning.bench.batches import Batch
from tuning.bench.cases import Attention, Case, Model, Product
from tuning.bench.file_cases import File
from tuning.bench.store_cases import Session, Store, Tables

ATTENTION = (
    Attention(1, 4096, 32, 8, 128),
    Attention(1, 32768, 32, 8, 128),
    Attention(1, 8192, 9, 3, 64),
    Attention(1, 2048, 4, 1, 256),
    Attention(512, 512, 9, 3, 64),
    Attention(512, 4096, 9, 3, 64),
)
DENSE = tuple(
    Product(n_out, n_in, rows)
    for rows in (1, 512)
    for n_out, n_in in ((576, 1536), (1536, 576), (49152, 576))
)
MODEL = (
    Model("q4_1", 512, ("f16", "q8_0")),
    Model("f16", 512, ("f16",)),
    Model("q8_0", 512),
    Model("q8_0", 4096),
)
CHAT = tuple(kind(30, rows, 3, 64) for rows in (512, 4096) for kind in (Session, Store))
SESSION = (*CHAT, *(File(30, rows, 3, 64) for rows in (4096, 16384)))
TABLES = tuple(Tables(n) for n in (10, 100, 1000, 10_000))
SUITES: dict[str, Sequence[Case]] = {
    "attn": ATTENTION,
    "dense": DENSE,
    "model": MODEL,
    "session": SESSION,
    "tables": TABLES,
}
QUICK: dict[str, Sequence[Case]] = {
    "attn": (Attention(1, 40, 4, 2, 32), Attention(17, 40, 4, 2, 32)),
    "dense": (Product(48, 64, 1), Product(48, 64, 33)),
    "model": (Model("q4_1", 16),),
    "session": (Session(2, 16, 2, 32), Store(2, 16, 2, 32), File(2, 16, 2, 32)),
    "tables": (Tables(10),),
}
ON_MATRIX_UNITS = ("f16", "q8_0")  # the formats of prefill: f32 cells are multiplied in f32
GPU_ATTENTION = (
    Batch(1, 8192, 32, 8, 128, batch=16, torn=True),
    Batch(1, 4096, 32, 8, 128, batch=64),
    Batch(1, 32768, 32, 8, 128),
    Batch(1, 4096, 32, 8, 128),
    Batch(1, 8192, 32, 32, 64, batch=8),
    Batch(1, 8192, 9, 3, 64, batch=16),
    Batch(8192, 8192, 32, 8, 128, kinds=ON_MATRIX_UNITS, torn=True),
    Batch(32768, 32768, 32, 8, 128, kinds=ON_MATRIX_UNITS),
    Batch(2048, 2048, 32, 8, 128, batch=4, kinds=ON_MATRIX_UNITS),
    Batch(8192, 8192, 32, 8, 64, kinds=ON_MATRIX_UNITS),
    Batch(8192, 8192, 9, 3, 64, kinds=ON_MATRIX_UNITS),
)
GPU_SUITES: dict[str, Sequence[Case]] = {
    "attn": GPU_ATTENTION,
    "dense": tuple(
        Product(n_out, n_in, 1)
        for n_out, n_in in ((576, 1536), (1536, 576), (49152, 576), (14336, 4096))
    ),
    "model": tuple(Model("q4_1", depth, ("f16", "q8_0"), read_as="f16") for depth in (512, 4096)),
}
GPU_QUICK: dict[str, Sequence[Case]] = {
    "attn": (
        Batch(1, 40, 4, 2, 32, batch=3, torn=True),
        Batch(33, 33, 4, 2, 32, batch=2, kinds=ON_MATRIX_UNITS, torn=True),
    ),
    "dense": (Product(48, 64, 1),),
    "model": (Model("q4_1", 16, ("f16",), read_as="f16"),),
}
KINDS: tuple[type[Case], ...] = (Attention, Batch, Product, Model, Session, Store, File, Tables)
CASES = {kind.what: kind for kind in KINDS}


def from_message(message: dict[str, Any]) -> Case:
    """The case that `message` came from."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in message.items() if k != "what"}
    return CASES[message["what"]](**fields)
