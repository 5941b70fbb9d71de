"""What a store does for sequences, and what it knows of them (contract 5).

Every operation is planned first, as a value, by the module of its noun; a plan that is not refused
is then carried out. Where rows move, how that happens is the matter of the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from minfer.kv import packing, prefixes, reservations
from minfer.kv.cells import CellTables
from minfer.kv.change import Change
from minfer.kv.runs import Move, Slot, Stats
from minfer.window import CellSpan


class Sequences(ABC):
    """Sequences in the cells of one arena. A refusal leaves everything as it was."""

    def __init__(self, tables: CellTables) -> None:
        self._tables = tables

    @abstractmethod
    def _carry_out(self, change: Change) -> None:
        """Move the rows and make the change so; all of it or, if it is refused, nothing."""

    @property
    def generation(self) -> int:
        """Rises with every change of the tables."""
        return self._tables.generation

    def reserve(self, seq: int, cap: int) -> Slot:
        """Cells for `cap` positions of `seq`: the lowest free run that holds them (5.2)."""
        self._carry_out(reservations.reserve(self._tables, seq, cap))
        return self._tables.slot(seq)

    def reserve_with_defrag(self, seq: int, cap: int) -> tuple[Slot, list[Move]]:
        """As `reserve`; compacts where free cells suffice but do not lie in a row (5.3)."""
        change = reservations.reserve(self._tables, seq, cap, defrag=True)
        self._carry_out(change)
        return self._tables.slot(seq), list(change.moves)

    def release(self, seq: int) -> None:
        """Forget `seq` and free its run; rows that others read stay for them (5.2)."""
        self._carry_out(reservations.release(self._tables, seq))

    def truncate(self, seq: int, rows: int) -> None:
        """Keep the first `rows` positions of `seq` (5.11)."""
        self._carry_out(reservations.truncate(self._tables, seq, rows))

    def resize(self, seq: int, cap: int) -> Slot:
        """Shrink the run of `seq` to `cap` cells, or grow it into free ones just above (5.3)."""
        self._carry_out(reservations.resize(self._tables, seq, cap))
        return self._tables.slot(seq)

    def resize_with_defrag(self, seq: int, cap: int) -> tuple[Slot, list[Move]]:
        """As `resize`; moves other runs where the cells above are not free (5.3)."""
        change = reservations.resize(self._tables, seq, cap, defrag=True)
        self._carry_out(change)
        return self._tables.slot(seq), list(change.moves)

    def defrag(self, need: int | None = None) -> list[Move]:
        """Pack runs downward until `need` free cells lie in a row, or all of them (5.6).

        Rows move verbatim. Whoever keeps the start of a run applies the moves to it.
        """
        change = packing.defrag(self._tables, need)
        self._carry_out(change)
        return list(change.moves)

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        """Let the empty sequence `dst` read the first `rows` rows of `src`; no bytes move (5.4).

        Either may write later: the rows it writes, and what it reads above them, are its own then.
        """
        self._carry_out(prefixes.share(self._tables, src, dst, rows))

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        """Copy the first `rows` rows of `src` to `dst`, which is empty or shares some (5.8)."""
        self._carry_out(prefixes.copy(self._tables, src, dst, rows))

    def sequences(self) -> list[int]:
        """The ids of all sequences that hold a run, ascending."""
        return sorted(self._tables.entries)

    def has(self, seq: int) -> bool:
        """Whether `seq` holds a run."""
        return self._tables.has(seq)

    def cap(self, seq: int) -> int:
        """Number of positions `seq` has cells for."""
        return self._tables.cap(seq)

    def written(self, seq: int) -> int:
        """Number of readable rows of `seq`."""
        return self._tables.written(seq)

    def spans(self, seq: int) -> list[CellSpan]:
        """Where the positions of `seq` lie, its own run in full (contract 1)."""
        return self._tables.spans(seq)

    def owners(self) -> list[int]:
        """The run id of every cell, -1 where it is free."""
        return self._tables.owners()

    def stats(self) -> Stats:
        """Counts of the whole store (5.9)."""
        return self._tables.stats()

    def digest(self) -> str:
        """A hash of the tables; equal tables, equal digest."""
        return self._tables.digest()

    def check(self) -> None:
        """Raise AssertionError if the tables contradict themselves."""
        self._tables.check()
