"""The op table, and how a kernel variant is declared.

An op is one word with one meaning: the oracle in `reference`, the kernels in every
`kernels_*` package, the test id, the tuning row and the command line all use it. A variant is one
algorithm for an op, a function named `<op>_<variant>` tagged by `@variant`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from minfer.errors import Refusal
from minfer.format import KvFormat

Config = Mapping[str, Any]
Kernel = Callable[..., Any]
Fn = TypeVar("Fn", bound=Kernel)

PREFILL, DECODE = "prefill", "decode"
KINDS = (PREFILL, DECODE)

# Which dimensions of a head row turn together: i and i + n_rot / 2, or 2i and 2i + 1.
HALF, INTERLEAVED = "half", "interleaved"
PAIRINGS = (HALF, INTERLEAVED)
CELLS, WEIGHT = "cells", "weight"  # what a storage format is of


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
    backends: tuple[str, ...] = ("kernels_numba",)

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


@dataclass(frozen=True)
class Numerics:
    """Where a variant rounds, and nowhere else (contract 4.6). query: of a product, its rows x."""

    query: str
    key: str
    prob: str
    value: str
    acc: str


def check_kind(kind: object) -> None:
    """Refuse a kind of tokens that is neither prefill nor decode."""
    if kind not in KINDS:
        raise Refusal("1", f"kind {kind!r} is none of {', '.join(KINDS)}", {"kind": kind})


def check_pairing(pairing: object) -> None:
    """Refuse a rope pairing that is neither half nor interleaved."""
    if pairing not in PAIRINGS:
        raise Refusal(
            "5.7", f"pairing {pairing!r} is neither {HALF} nor {INTERLEAVED}", {"pairing": pairing}
        )


@dataclass(frozen=True)
class Shape:
    """What a choice of variant may depend on; never positions, cells or sequences."""

    kind: str = PREFILL
    n_q: int = 1
    n_head: int = 1
    n_head_kv: int = 1
    head_dim: int = 64

    def __post_init__(self) -> None:
        check_kind(self.kind)
        for name in ("n_q", "n_head", "n_head_kv", "head_dim"):
            size, least = getattr(self, name), int(name != "n_q")  # a call may hold no query
            if not isinstance(size, int) or size < least:
                raise Refusal(
                    "10",
                    f"{name} is {size!r}; a shape has a whole number of at least {least}",
                    {"name": name, "value": size, "least": least},
                )


@dataclass(frozen=True)
class Limits:
    """What a variant takes, as data, so that a refusal can be printed. Empty means anything."""

    kinds: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    head_dim_multiple: int = 1

    def why_not(self, shape: Shape) -> str | None:
        """Why `shape` is not taken, or None if it is."""
        if self.kinds and shape.kind not in self.kinds:
            return f"is for {' and '.join(self.kinds)}, not {shape.kind}"
        if self.head_dims and shape.head_dim not in self.head_dims:
            return f"head_dim {shape.head_dim} is not one of {list(self.head_dims)}"
        if shape.head_dim % self.head_dim_multiple:
            return f"head_dim {shape.head_dim} is no multiple of {self.head_dim_multiple}"
        return None


@dataclass(frozen=True)
class Tunable:
    """A knob. `numeric` ones may change bits and are never tuned by shape (contract 6.4)."""

    default: Any
    values: tuple[Any, ...]
    numeric: bool = False


@dataclass(frozen=True, eq=False)
class Variant:
    """One algorithm for one op, as the registry sees it."""

    op: str
    name: str
    launch: Kernel
    formats: tuple[KvFormat, ...]
    limits: Limits
    query: Mapping[KvFormat, str]
    invariant: bool
    space: Mapping[str, Tunable]
    default: bool

    @property
    def source(self) -> tuple[str, int]:
        """File and line of the launcher."""
        code = inspect.unwrap(self.launch).__code__
        return code.co_filename, code.co_firstlineno

    def numerics(self, fmt: KvFormat) -> Numerics:
        """Where this variant rounds when it reads cells of `fmt`."""
        return Numerics(self.query.get(fmt, "f32"), fmt.value, "f32", fmt.value, "f32")

    def config(self) -> dict[str, Any]:
        """The default configuration."""
        return {name: tunable.default for name, tunable in self.space.items()}


def split_name(function_name: str) -> tuple[str, str]:
    """`attn_window_split` -> (`attn_window`, `split`); raises ValueError for an unknown op."""
    for op in sorted(OPS, key=len, reverse=True):
        name = function_name.removeprefix(op + "_")
        if name != function_name and re.fullmatch("[a-z][a-z0-9]*", name):
            return op, name
    raise ValueError(
        f"{function_name} is not named <op>_<variant> with an op of {', '.join(OPS)} "
        "and a variant of one lower-case word"
    )


def variant(
    *,
    formats: tuple[KvFormat, ...] = tuple(KvFormat),
    limits: Limits | None = None,
    query: Mapping[KvFormat, str] | None = None,
    invariant: bool = True,
    space: Mapping[str, Tunable] | None = None,
    default: bool = True,
) -> Callable[[Fn], Fn]:
    """Tag a launcher as a variant. Only a tag: `registry.collect` finds it.

    formats: storage formats it reads (ops without formats ignore this). limits: shapes it takes.
    query: how it rounds the queries of attention or the rows x of a product, per format, f32 where
    absent. invariant: whether contract 6 holds for it. space: its tunables. default: whether it may
    be chosen without being named.
    """

    def tag(launch: Fn) -> Fn:
        op, name = split_name(launch.__name__)
        wanted, given = OPS[op].parameters, tuple(inspect.signature(launch).parameters)
        if given != wanted:
            raise TypeError(f"{launch.__name__}{given} must take {wanted}")
        launch.__minfer_variant__ = Variant(  # type: ignore[attr-defined]
            op=op,
            name=name,
            launch=launch,
            formats=formats,
            limits=limits or Limits(),
            query=dict(query or {}),
            invariant=invariant,
            space=dict(space or {}),
            default=default,
        )
        return launch

    return tag
