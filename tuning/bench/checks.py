"""Is an answer right? Decided here, in the parent, before anything of it is timed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minfer.format import KvFormat
from tuning.bench.batches import Batch, expected_batch
from tuning.bench.cases import Attention, Case, Model, Product
from tuning.bench.file_cases import File
from tuning.bench.inputs import Expected, expected_attention, expected_product
from tuning.bench.store_cases import Session, Store, Tables

# What a peer's answer may be off, of the largest answer. f16: ggml adds values up in f16.
TOLERANCE = {"f32": 5e-5, "f16": 5e-2, "q8_0": 3e-2, "bf16": 3e-2}
CAP = {"f32": 1e-5, "f16": 1e-5, "q8_0": 3e-2}  # ours, against unrounded queries, likewise
# On a GPU, of the largest answer of the same query: queries and weights are rounded to 16 bits.
BATCH = {"f32": 2e-5, "f16": 3e-3, "q8_0": 3e-3, "bf16": 2e-2, "fp8": 1.5e-1}
LOGITS = 0.1  # |difference| / |reference| of centred logits, over weights and cache types
# Rows kept in a store, of the largest; rows that were also turned, and rounded once more.
SESSION = {"f32": 0.0, "f16": 5e-4, "q8_0": 5e-3}
STORE = {"f32": 1e-6, "f16": 5e-4, "q8_0": 1e-2}


class Check(NamedTuple):
    """error and tolerance are of the same unit, named by `unit`."""

    passed: bool
    error: float
    tolerance: float
    unit: str


ANOTHER_SHAPE = Check(False, float("nan"), 0, "another shape")


@lru_cache(maxsize=8)
def expected(case: Case, fmt: str, query: str) -> Expected | None:
    """What the oracle says, None for a case that has none."""
    if isinstance(case, Batch):
        return expected_batch(case, KvFormat(fmt))
    if isinstance(case, Attention):
        return expected_attention(case, KvFormat(fmt), query)
    if isinstance(case, Product):
        return expected_product(case, KvFormat(fmt), query)
    return None


def check_ours(case: Case, fmt: str, values: NDArray[Any], facts: Mapping[str, Any]) -> Check:
    """The budget of contract 4.6: twice the error of float32 numpy, with queries rounded alike."""
    if isinstance(case, Tables):
        return _within(np.abs(values[0] - values[1]).max(), 0, "counts")
    if isinstance(case, File):
        return _same(values)
    if isinstance(case, Session | Store):
        kept, given = values
        tolerance = (SESSION if isinstance(case, Session) else STORE)[fmt]
        return _within(np.abs(kept - given).max() / np.abs(given).max(), tolerance, "of max")
    truth = expected(case, fmt, facts.get("query", "f32"))
    if truth is None:  # a model, which its peers are compared with
        return _within(np.count_nonzero(~np.isfinite(values)), 0, "values not finite")
    if values.shape != truth.exact.shape:
        return ANOTHER_SHAPE
    if isinstance(case, Batch):
        return _of_each_query(values, truth, BATCH[fmt])
    budget = _within(np.abs(values - truth.rounded).max(), truth.budget, "absolute")
    cap = _within(np.abs(values - truth.exact).max() / truth.scale, CAP[fmt], "of max")
    return budget if cap.passed else cap


def check_peer(
    case: Case,
    fmt: str,
    values: NDArray[Any],
    facts: Mapping[str, Any],
    reference: NDArray[Any] | None,
) -> Check:
    """Against the same oracle with the tolerance of its format; a model against our own logits.

    reference: logits of our column for the same file and cache.
    """
    if isinstance(case, Model):
        if reference is None:
            return Check(False, float("nan"), LOGITS, "of our logits")
        ours, theirs = (np.asarray(x, np.float64) for x in (reference, values))
        ours, theirs = ours - ours.mean(), theirs - theirs.mean()
        error = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
        return _within(error, LOGITS, "of our logits")
    if isinstance(case, File):
        return _same(values)
    truth = expected(case, fmt, "f32")
    assert truth is not None
    if values.shape != truth.exact.shape:
        return ANOTHER_SHAPE
    if isinstance(case, Batch):
        return _of_each_query(values, truth, BATCH[facts.get("format", fmt)])
    error = np.abs(values - truth.exact).max() / truth.scale
    return _within(error, TOLERANCE[facts.get("format", fmt)], "of max")


def _same(values: NDArray[Any]) -> Check:
    """What was read back is what was written."""
    return _within(np.count_nonzero(values[0] != values[1]), 0, "values that differ")


def _of_each_query(values: NDArray[Any], truth: Expected, tolerance: float) -> Check:
    """The first query sees one key and a late one thousands: their answers differ in size."""
    off, scale = (np.abs(x).max(axis=(1, 2)) for x in (values - truth.exact, truth.exact))
    return _within((off / scale).max(), tolerance, "of max")


def _within(error: Any, tolerance: float, unit: str) -> Check:
    error = float(error)
    return Check(bool(abs(error) <= tolerance), error, tolerance, unit)
