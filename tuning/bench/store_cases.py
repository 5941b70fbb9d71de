"""What is measured of the cell store, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minfer.format import KvFormat, cell_bytes
from tuning.bench.cases import Case, Work


@dataclass(frozen=True)
class Session(Case):
    """What a chat pays to the cell store: a sequence of `rows` rows in `n_layer` layers."""

    what: ClassVar[str] = "session"
    measures: ClassVar[tuple[str, ...]] = (
        "step",
        "step and write",
        "export",
        "export cells",
        "import",
        "move",
        "copy",
    )
    n_layer: int
    rows: int
    n_head_kv: int
    head_dim: int

    def work(self, fmt: str, measure: str) -> Work | None:
        if measure.startswith("step"):
            return None
        cells = 2 * self.n_layer * self.rows
        return Work(moved=cells * cell_bytes(KvFormat(fmt), self.n_head_kv * self.head_dim))

    def label(self, measure: str) -> str:
        names = {
            "step": f"decode step at {self.rows}, tables only",
            "step and write": f"decode step at {self.rows}, a row into {self.n_layer} layers",
            "export": f"export {self.rows} rows as float32",
            "export cells": f"export {self.rows} rows as stored",
            "import": f"import {self.rows} rows from float32",
            "move": f"move {self.rows} rows",
            "copy": f"copy the bytes of {self.rows} rows",
        }
        return names[measure]


@dataclass(frozen=True)
class Store(Case):
    """What it costs to share, copy and rearrange `rows` rows in `n_layer` layers.

    A sequence that writes does so in the middle of what is shared: half the rows are copied.
    pieces: of rows that a compaction packs. removed: positions in front of all that stay.
    """

    what: ClassVar[str] = "store"
    measures: ClassVar[tuple[str, ...]] = (
        "share",
        "sharer writes",
        "donor writes",
        "copy",
        "defrag",
        "remove",
        "plain copy",
    )
    pieces: ClassVar[int] = 8
    removed: ClassVar[int] = 5
    n_layer: int
    rows: int
    n_head_kv: int
    head_dim: int

    @property
    def middle(self) -> int:
        """The position that is written."""
        return self.rows // 2

    def moved(self, measure: str) -> int:
        """Rows that are copied in every layer."""
        if measure == "share":
            return 0
        if measure.endswith("writes"):
            return self.rows - self.middle - 1
        return self.rows - self.removed if measure == "remove" else self.rows

    def takes(self, fmt: str, measure: str) -> bool:
        return (fmt, measure) != ("f16", "remove")  # contract 5.7 refuses it

    def work(self, fmt: str, measure: str) -> Work | None:
        rows = 2 * self.n_layer * self.moved(measure)
        if not rows:
            return None
        return Work(moved=rows * cell_bytes(KvFormat(fmt), self.n_head_kv * self.head_dim))

    def label(self, measure: str) -> str:
        rows = self.moved(measure)
        names = {
            "share": f"share_prefix of {self.rows} rows",
            "sharer writes": f"a sharer writes: step and {rows} rows copied",
            "donor writes": f"a donor writes: step and {rows} rows copied",
            "copy": f"copy_prefix of {rows} rows",
            "defrag": f"defrag, {rows} rows in {self.pieces} pieces",
            "remove": f"remove {self.removed} positions before {rows}",
            "plain copy": f"copy the bytes of {rows} rows",
        }
        return names[measure]


@dataclass(frozen=True)
class Tables(Case):
    """Bookkeeping alone, without bytes: an operation beside `sequences` others, cells in pieces."""

    what: ClassVar[str] = "tables"
    measures: ClassVar[tuple[str, ...]] = (
        "reserve",
        "release",
        "append",
        "truncate",
        "remove",
        "resize",
        "share",
        "copy",
        "sharer writes",
        "donor writes",
        "stats",
        "defrag",
    )
    sequences: int

    @property
    def formats(self) -> tuple[str, ...]:
        return ("",)

    def work(self, fmt: str, measure: str) -> Work | None:
        return None

    def label(self, measure: str) -> str:
        return f"{measure}, {self.sequences} sequences"
