"""Named cases with seeded inputs: the same ones serve tests, sweeps and examples."""

from minfer.cases.cells import MOVE_CASES, TURN_CASES, MoveCase, TurnCase, any_bytes, turn_inputs
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
    "MOVE_CASES",
    "RUNS",
    "SIZED_CASES",
    "SPAN",
    "TURN_CASES",
    "WIDTHS",
    "Case",
    "Inputs",
    "MoveCase",
    "Rows",
    "Spans",
    "TurnCase",
    "any_bytes",
    "cut",
    "make",
    "region",
    "rows",
    "scatter",
    "turn_inputs",
    "windows",
]
