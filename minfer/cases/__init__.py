"""Named attention cases with seeded inputs: the same ones serve tests, sweeps and examples."""

from minfer.cases.inputs import Inputs, Rows, Spans, cut, make, region, rows, scatter, windows
from minfer.cases.table import (
    CASES,
    CAUSAL,
    HEADS_OF_DIM,
    LOUD_CASES,
    RUNS,
    SIZED_CASES,
    SPAN,
    WIDTHS,
    Case,
)

__all__ = [
    "CASES",
    "CAUSAL",
    "HEADS_OF_DIM",
    "LOUD_CASES",
    "RUNS",
    "SIZED_CASES",
    "SPAN",
    "WIDTHS",
    "Case",
    "Inputs",
    "Rows",
    "Spans",
    "cut",
    "make",
    "region",
    "rows",
    "scatter",
    "windows",
]
