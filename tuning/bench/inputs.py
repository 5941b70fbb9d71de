"""Seeded inputs of a case, equal in every process, and the float64 answers they must give."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer import reference
from minfer.format import BLOCK, Floats, KvFormat, Region
from tuning.bench.cases import Attention, Product

CHECKED_ROWS = 4  # rows of x whose products are compared with the oracle


class AttentionInputs(NamedTuple):
    """q [n_q, n_head, d]; k, v [n_cells, n_head_kv, d]; positions [n_q] of the queries."""

    q: Floats
    k: Floats
    v: Floats

    @property
    def positions(self) -> NDArray[np.int32]:
        return np.arange(len(self.k) - len(self.q), len(self.k), dtype=np.int32)


class Expected(NamedTuple):
    """The answer in float64, the budget of our own error, and the largest answer.

    exact: of unrounded queries. rounded: of queries as our variant rounds them. budget: what
    |ours - rounded| may be: twice what float32 numpy makes of the same inputs, plus 1e-6 of the
    scale.
    """

    exact: NDArray[np.float64]
    rounded: NDArray[np.float64]
    budget: float

    @property
    def scale(self) -> float:
        return float(np.abs(self.exact).max())


@lru_cache(maxsize=1)
def attention_inputs(case: Attention) -> AttentionInputs:
    """Normal rows; scores have a deviation of 1, so a softmax weighs many keys."""
    rng = np.random.default_rng(zlib.crc32(case.label("").encode()))
    q = rng.standard_normal((case.n_q, case.n_head, case.head_dim), dtype=np.float32)
    shape = (2, case.n_cells, case.n_head_kv, case.head_dim)
    k, v = rng.standard_normal(shape, dtype=np.float32)
    return AttentionInputs(q, k, v)


@lru_cache(maxsize=1)
def product_inputs(case: Product) -> tuple[Floats, Floats]:
    """weight [n_out, n_in] and x [rows, n_in], normal; products have a deviation of 1."""
    rng = np.random.default_rng(zlib.crc32(case.label("").encode()))
    weight = rng.standard_normal((case.n_out, case.n_in), dtype=np.float32)
    weight *= np.float32(case.n_in**-0.5)
    return weight, rng.standard_normal((case.rows, case.n_in), dtype=np.float32)


def checked_heads(case: Attention) -> list[int]:
    """Query heads of the checked KV heads."""
    group = case.n_head // case.n_head_kv
    return [head * group + i for head in case.checked[1] for i in range(group)]


def checked_attention(case: Attention, out: Floats) -> Floats:
    """The part of out [n_q, n_head, d] that is compared with the oracle."""
    return np.ascontiguousarray(out[case.checked[0]][:, checked_heads(case)])


def checked_product(out: Floats) -> Floats:
    """The part of out [rows, n_out] that is compared with the oracle."""
    return np.ascontiguousarray(picked_rows(out))


def picked_rows(out: Any) -> Any:
    """That part of an array of any library, not copied."""
    return out[:: max(1, len(out) // CHECKED_ROWS)][:CHECKED_ROWS]


def expected_attention(case: Attention, fmt: KvFormat, query: str) -> Expected:
    """Over K and V as `fmt` stores them, for the checked queries and heads.

    query: how our variant rounds the query, a name of `reference.round_query`.
    """
    inputs = attention_inputs(case)
    queries, kv_heads = case.checked
    q = np.ascontiguousarray(inputs.q[queries][:, checked_heads(case)])
    regions = [
        region(fmt, np.ascontiguousarray(rows[:, kv_heads])) for rows in (inputs.k, inputs.v)
    ]
    positions = inputs.positions[queries]
    tensors: Any = (*regions, positions, reference.runs_of(positions, None))
    how: Any = {"fmt": fmt, "scale": case.head_dim**-0.5, "width": 0}
    exact = reference.attention(q, *tensors, **how)
    seen = reference.round_query(q, query)
    rounded = exact if query == "f32" else reference.attention(seen, *tensors, **how)
    single = reference.attention(seen, *tensors, **how, dtype=np.float32)
    return Expected(exact, rounded, 2 * float(np.abs(single - rounded).max()) + 1e-6)


def region(fmt: KvFormat, rows: Floats) -> Region:
    """A canonical region that holds rows [n, n_head_kv, d]."""
    n, n_head_kv, head_dim = rows.shape
    cells = reference.encode_rows(rows.reshape(n, -1), fmt)
    return Region(fmt, "canonical", n_head_kv, head_dim, (cells,))


def expected_product(case: Product, fmt: KvFormat, query: str) -> Expected:
    """Products with the weight as `fmt` stores it, for the checked rows of x.

    query: how our variant rounds x, a name of `reference.round_query`.
    """
    weight, x = product_inputs(case)
    decoded = reference.decode_weight(reference.encode_weight(weight, fmt), fmt)
    x = checked_product(x)
    seen = x if query == "f32" else reference.round_query(x.reshape(-1, BLOCK), query)
    seen = seen.reshape(x.shape)
    wide = decoded.astype(np.float64)
    exact, rounded = x.astype(np.float64) @ wide.T, seen.astype(np.float64) @ wide.T
    single = seen @ decoded.T
    return Expected(exact, rounded, 2 * float(np.abs(single - rounded).max()) + 1e-6)
