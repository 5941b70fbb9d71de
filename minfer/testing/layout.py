"""Where rows must lie: contract 5 read line by line, over a handful of runs.

Written for reading, not for speed: runs are listed afresh for every question, and orphans are cut
after every operation. It knows how many rows a sequence has, never what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minfer.testing.contents import Group, require
from minfer.testing.places import Holding, Places


class Moved(NamedTuple):
    """`rows` rows of run `run`, which went from cell `src` to cell `dst`."""

    run: int
    src: int
    dst: int
    rows: int


class Layout(Places):
    """Every operation of `Contents`, with the refusals that depend on cells.

    Call it on a copy: a refused step or compaction leaves it half changed.
    """

    def reserve(self, seq: int, cap: int) -> int:
        require(cap > 0, f"a run of {cap} cells")
        if seq in self.seqs:
            held = self.seqs[seq].run
            require(cap <= self.runs[held].cap, f"{seq} holds {self.runs[held].cap} cells")
            return held
        self.seqs[seq] = Holding(self.new_run(seq, cap))
        return self.seqs[seq].run

    def release(self, seq: int) -> None:
        self.runs[self.known(seq).run].owner = None
        del self.seqs[seq]
        self.settle()

    def truncate(self, seq: int, rows: int) -> None:
        held = self.known(seq)
        held.written = rows
        self.keep_share(held, min(held.share, rows))
        self.settle()

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        donor, held = self.known(src), self.known(dst)
        limit = donor.written if donor.root is None else donor.share
        require(rows <= limit, f"{rows} rows of {src}, which may give {limit}")
        require(held.root is None, f"{dst} shares already")
        require(not self.shares(held.run), f"others read the run of {dst}")
        held.root = donor.run if donor.root is None else donor.root
        held.share = held.written = rows
        self.events["share of a share"] += donor.root is not None

    def copy_prefix(self, src: int, dst: int, rows: int) -> None:
        source, held = self.known(src), self.known(dst)
        require(not self.shares(held.run), f"others read the run of {dst}")
        require(held.written == held.share, f"{dst} has rows of its own")
        if held.root is not None:
            same = held.root == source.root and held.share <= source.share
            same |= held.root == source.run and held.share <= source.written
            require(same, f"{dst} shares other cells than those of {src}")
            self.events["copy above a share"] += rows > held.share
        require(rows <= self.cap(dst), f"{rows} rows in {self.cap(dst)} cells")
        self.counts["rows_copied"] += rows - held.written
        held.written = rows

    def remove(self, seq: int, start: int, length: int) -> None:
        held = self.known(seq)
        others = self.read_by_others(held.run)
        require(start >= held.share, f"{seq} shares {held.share} rows")
        require(start >= others, f"others read {others} rows of {seq}")
        held.written -= length
        self.events["remove beside readers"] += others > 0
        self.events["remove above a share"] += held.share > 0

    def shift(self, seq: int, drop: int) -> None:
        self.remove(seq, 0, drop)

    # Compaction (5.3, 5.6).

    def defrag(self, need: int | None = None) -> list[Moved]:
        require(need is None or need <= self.free, f"{need} of {self.free} free cells")
        return self.pack(need)

    def reserve_with_defrag(self, seq: int, cap: int) -> tuple[int, list[Moved]]:
        moves: list[Moved] = []
        if seq not in self.seqs and self.largest_gap < cap:
            require(cap <= self.free, f"{cap} of {self.free} free cells")
            moves = self.pack(cap)
        return self.reserve(seq, cap), moves

    def resize(self, seq: int, cap: int) -> int:
        held = self.known(seq)
        require(cap >= max(1, self.rows(held.run)), f"{self.rows(held.run)} rows are read")
        require(cap <= self.most_in_place(held.run), "the cells above are not free")
        self.runs[held.run].cap = cap
        return held.run

    def resize_with_defrag(self, seq: int, cap: int) -> tuple[int, list[Moved]]:
        held = self.known(seq)
        if cap < self.rows(held.run) or cap <= self.most_in_place(held.run):
            return self.resize(seq, cap), []
        require(cap - self.runs[held.run].cap <= self.free, f"{cap} cells, {self.free} are free")
        return held.run, self.grow(held.run, cap)

    def most_in_place(self, number: int) -> int:
        """Cells of a run and of the gap just above it."""
        run = self.runs[number]
        return run.cap + dict(self.gaps()).get(run.start + run.cap, 0)

    def pack(self, need: int | None) -> list[Moved]:
        """Runs go down in cell order until a gap of `need` is there; the moves, in their order."""
        before = {number: run.start for number, run in self.runs.items()}
        cell = 0
        for run in self.in_order():
            if need is not None and self.largest_gap >= need:
                break
            run.start = cell
            cell += run.cap
        return self.moved(before)

    def grow(self, number: int, cap: int) -> list[Moved]:
        """Runs up to this one go down; those above it go up, no further than they are pushed."""
        before = {run: place.start for run, place in self.runs.items()}
        cell = 0
        for run in self.in_order():
            run.start = max(cell, run.start) if run.start > before[number] else cell
            if run is self.runs[number]:
                run.cap = cap
            cell = run.start + run.cap
        return self.moved(before)

    def moved(self, before: dict[int, int]) -> list[Moved]:
        """What the new starts ask for: up from the top down, then down from the bottom up."""
        moves = [
            Moved(number, start, self.runs[number].start, self.rows(number))
            for number, start in before.items()
            if self.runs[number].start != start
        ]
        up = sorted((m for m in moves if m.dst > m.src), key=lambda m: -m.src)
        down = sorted((m for m in moves if m.dst < m.src), key=lambda m: m.src)
        self.counts["defrags"] += bool(moves)
        self.counts["cells_moved"] += sum(move.rows for move in moves)
        self.events["compaction that moved an orphan"] += any(
            self.runs[move.run].owner is None for move in moves
        )
        self.events["compaction with a move upwards"] += bool(up)
        return up + down

    # Steps (5.5).

    def step(self, groups: Sequence[Group]) -> int:
        """How many rows copy-on-write copied."""
        copied = self.open(groups)
        for seq, t, values in groups:
            held = self.seqs[seq]
            held.written = max(held.written, t + len(values))
        return copied

    def failing_step(self, groups: Sequence[Group]) -> int:
        copied = self.open(groups)
        for seq, t, _ in groups:
            self.seqs[seq].written = t
        return copied

    def open(self, groups: Sequence[Group]) -> int:
        """Sharers first, then donors, so that nothing depends on the order of groups."""
        copied = self.counts["rows_copied"]
        for seq, t, values in sorted(groups):
            held = self.known(seq)
            if t < held.share:
                self.leave_share(held, t, t + len(values))
        self.settle()
        for seq, t, values in sorted(groups):
            held, end = self.seqs[seq], t + len(values)
            require(end <= self.cap(seq), f"position {end - 1}, cap {self.cap(seq)}")
            if t < self.read_by_others(held.run):
                self.leave_run(seq, held, t, end)
        return self.counts["rows_copied"] - copied

    def leave_share(self, held: Holding, t: int, end: int) -> None:
        """Copy-on-write of a sharer: its rows from `t` on come to lie in its own run."""
        cap = self.runs[held.run].cap
        require(max(held.written, end) <= t + cap, f"rows from {t} on in {cap} cells")
        self.keep_share(held, t)
        self.count_copy(held, end)
        self.events["sharer copies"] += 1
        self.events["sharer copies, rows kept"] += held.written > end

    def leave_run(self, seq: int, held: Holding, t: int, end: int) -> None:
        """Copy-on-write of a donor: readers keep the old run, it goes on in a new one."""
        old, cap = held.run, self.runs[held.run].cap
        self.events["donor copies"] += 1
        self.events["donor copies, rows kept"] += held.written > end
        self.events["donor copies from position 0"] += t == 0
        self.events["donor copies again"] += held.times_copied > 0
        self.events["orphan of two readers or more"] += len(self.shares(old)) > 1
        self.runs[old].owner = None
        self.settle()
        held.run = self.new_run(seq, cap - t)
        held.root = old
        held.times_copied += 1
        self.keep_share(held, t)
        self.count_copy(held, end)

    def count_copy(self, held: Holding, end: int) -> None:
        """Rows above the group that lost their cell were copied."""
        self.counts["copy_on_writes"] += 1
        self.counts["rows_copied"] += max(0, held.written - end)
