"""The op table: one row an op, and the words its arguments take."""

from __future__ import annotations

from dataclasses import dataclass

from minfer.errors import Refusal

PREFILL, DECODE = "prefill", "decode"
KINDS = (PREFILL, DECODE)

# Which dimensions of a head row turn together: i and i + n_rot / 2, or 2i and 2i + 1.
HALF, INTERLEAVED = "half", "interleaved"
PAIRINGS = (HALF, INTERLEAVED)
CELLS, WEIGHT = "cells", "weight"  # what a storage format is of
F32 = "f32"
ACTIVATIONS = (F32, "f16", "bf16")  # what operands of products may be rounded to


@dataclass(frozen=True)
class Op:
    """One row of the op table.

    `args` are the tensors in the order of the equation and `keywords` the scalars; every backend
    and the oracle take exactly these. `formats` says what `fmt` is the format of, "" for nothing.
    """

    name: str
    args: tuple[str, ...]
    keywords: tuple[str, ...]
    summary: str
    formats: str = ""
    backends: tuple[str, ...] = ("kernels_numba", "kernels_triton", "kernels_mlx")

    @property
    def parameters(self) -> tuple[str, ...]:
        return (*self.args, *self.keywords, "config")


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            "attn_window",
            ("q", "k", "v", "positions", "span", "tiles"),
            ("fmt", "scale", "width"),
            "attention over cells [0, pos] or one [lo, hi) per query",
            formats=CELLS,
        ),
        Op(
            "attn_map",
            ("q", "k", "v", "positions", "runs", "tiles"),
            ("fmt", "scale", "width"),
            "attention over up to four (cell, length) runs per query",
            formats=CELLS,
        ),
        Op("store_cells", ("region", "rows", "cells"), ("fmt",), "rows into cells", CELLS),
        Op(
            "move_cells",
            ("region", "moves"),
            (),
            "cells of (src, dst, rows), move after move, each like memmove",
        ),
        Op(
            "map_q8_0_cells",
            ("region", "cells", "cos", "sin"),
            ("pairing",),
            "dequantize cells, rotate every head by one table row, quantize",
        ),
        Op("quantize_q8_0", ("rows",), (), "f32 rows to canonical q8_0 cells"),
        Op("dequantize_q8_0", ("cells",), ("n",), "canonical q8_0 cells to n f32 each"),
        Op("dot_q8_0", ("a", "b"), ("n",), "row by row product of two sets of q8_0 cells"),
        Op("matvec", ("weight", "x"), ("fmt",), "x @ weight.T, a few rows (decode)", WEIGHT),
        Op("matmul", ("weight", "x"), ("fmt",), "x @ weight.T, many rows (prefill)", WEIGHT),
        Op("rms_norm", ("x", "weight"), ("eps",), "x / rms(x) * weight, row by row"),
        Op(
            "rope",
            ("x", "positions", "cos", "sin"),
            ("pairing",),
            "rotate pairs of every head row by the table row of its position",
        ),
        Op("silu_mul", ("gate", "up"), (), "gate * sigmoid(gate) * up"),
        Op("gelu_mul", ("gate", "up"), (), "gelu(gate) * up, gelu in its tanh form"),
        Op("add", ("x", "y"), (), "x + y, of the same shape or one row"),
        Op("scale", ("x",), ("factor",), "x * factor"),
        Op("softcap", ("x",), ("cap",), "cap * tanh(x / cap)"),
        Op("embed", ("weight", "tokens"), ("fmt",), "rows of weight", WEIGHT),
        Op(
            "qkv_rope_store",
            ("q", "k", "v", "k_region", "v_region", "positions", "cells", "cos", "sin"),
            ("fmt", "pairing"),
            "rotate q and k by position, store k and v by cell; the rotated q and both regions",
            formats=CELLS,
        ),
    )
}


def check_kind(kind: object) -> None:
    """Refuse a kind of tokens that is neither prefill nor decode."""
    if kind not in KINDS:
        raise Refusal("1", f"kind {kind!r} is none of {', '.join(KINDS)}", {"kind": kind})


def check_activations(activations: object) -> None:
    """Refuse a type of activations that is none of f32, f16 and bf16."""
    if activations not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        message = f"activations {activations!r} are none of {known}; leave them out for f32"
        raise Refusal("10", message, {"activations": repr(activations)})


def check_pairing(pairing: object) -> None:
    """Refuse a rope pairing that is neither half nor interleaved."""
    if pairing not in PAIRINGS:
        raise Refusal(
            "5.7", f"pairing {pairing!r} is neither {HALF} nor {INTERLEAVED}", {"pairing": pairing}
        )
