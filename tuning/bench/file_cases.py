"""What is measured of session files, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minfer.format import KvFormat, cell_bytes
from tuning.bench.cases import Case, Work


@dataclass(frozen=True)
class File(Case):
    """Saving and loading `rows` rows in `n_layer` layers.

    Beside it a copy of the same file that is brought to the disk, which is what a program that
    trusts its files pays. cold: the file that is read is not in memory.
    """

    what: ClassVar[str] = "file"
    measures: ClassVar[tuple[str, ...]] = ("save", "load", "load cold")
    n_layer: int
    rows: int
    n_head_kv: int
    head_dim: int

    def bytes_of(self, fmt: str) -> int:
        """Of all rows, as stored."""
        cell = cell_bytes(KvFormat(fmt), self.n_head_kv * self.head_dim)
        return 2 * self.n_layer * self.rows * cell

    def work(self, fmt: str, measure: str) -> Work | None:
        return Work(moved=self.bytes_of(fmt))

    def label(self, measure: str) -> str:
        names = {
            "save": f"save {self.rows} rows, and bring them to the disk",
            "load": f"verify and load {self.rows} rows",
            "load cold": f"verify and load {self.rows} rows, from the disk",
        }
        return names[measure]
