"""The store kit: its reading of the contract, what it finds, how it says so."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from toy_caches import CellsCache

from minfer import testing
from minfer.errors import Refusal
from minfer.testing.contents import Contents, Group, Impossible
from minfer.testing.layout import Layout

A, B, C = 1, 2, 3
PAGE = Path(__file__).parent.parent / "docs" / "testing-a-store.md"


def rows(t: int, n: int, seq: int = A) -> list[Group]:
    return [(seq, t, list(range(n)))]


def refuses(layout: Layout, name: str, *args: Any) -> None:
    with pytest.raises(Impossible):
        getattr(layout.copy(), name)(*args)


def sharing(n_ctx: int, cap: int, written: int, own: int) -> Layout:
    """A at cell 0, B above it with a share of 4."""
    layout = Layout(n_ctx)
    layout.reserve(A, cap)
    layout.step(rows(0, written))
    layout.reserve(B, own)
    layout.share_prefix(A, B, 4)
    return layout


def owned(layout: Layout) -> list[tuple[int, int, int | None]]:
    return [(run.start, run.cap, run.owner) for run in layout.in_order()]


def test_the_layout_follows_example_i() -> None:
    layout = sharing(16, 4, 4, 4)
    layout.step(rows(4, 2, B))
    assert layout.step(rows(3, 1, B)) == 2
    assert layout.spans(B) == [(0, 0, 3), (3, 4, 4)]
    assert layout.stats()["written"] == 4 + 3


def test_the_layout_follows_example_ii() -> None:
    layout = sharing(16, 6, 5, 3)
    assert layout.step(rows(2, 1)) == 2
    assert layout.spans(A) == [(0, 0, 2), (2, 9, 4)]
    assert layout.gaps() == [(4, 2), (13, 3)]
    assert layout.spans(B) == [(0, 0, 4), (4, 6, 3)]
    layout.reserve(C, 3)
    assert layout.spans(C) == [(0, 13, 3)]
    refuses(layout, "share_prefix", A, C, 3)
    layout.share_prefix(A, C, 2)
    layout.step(rows(1, 1))
    assert layout.spans(A) == [(0, 0, 1), (1, 9, 4)]
    refuses(layout, "step", rows(0, 1))


def test_the_layout_follows_example_iii() -> None:
    layout = sharing(12, 4, 4, 2)
    layout.step(rows(0, 1))
    assert owned(layout) == [(0, 4, None), (4, 2, B), (6, 4, A)]
    layout.reserve(C, 2)
    layout.share_prefix(A, C, 4)
    refuses(layout, "step", rows(1, 1))
    layout.release(B)
    assert owned(layout) == [(6, 4, A), (10, 2, C)]
    layout.step(rows(1, 1))
    assert owned(layout) == [(0, 3, A), (6, 4, None), (10, 2, C)]
    assert layout.events["donor copies again"] == 1


def test_the_layout_grows_a_run_as_the_contract_does() -> None:
    layout = Layout(14)
    for seq in (A, B, C):
        layout.reserve(seq, 4)
        layout.step(rows(0, seq, seq))
    _, moves = layout.resize_with_defrag(A, 6)
    assert [move[1:] for move in moves] == [(8, 10, 3), (4, 6, 2)]
    assert (layout.counts["defrags"], layout.counts["cells_moved"]) == (1, 5)


def test_the_layout_packs_until_there_is_a_gap() -> None:
    layout = Layout(12)
    for seq in range(6):
        layout.reserve(seq, 2)
    for seq in (0, 2, 4):
        layout.release(seq)
    assert [move[1:3] for move in layout.copy().defrag(4)] == [(2, 0), (6, 2)][:1]
    assert [move[1:3] for move in layout.copy().defrag()] == [(2, 0), (6, 2), (10, 4)]
    assert layout.copy().defrag(2) == []
    refuses(layout, "defrag", 7)


def test_contents_are_a_dict_of_positions() -> None:
    contents = Contents()
    contents.reserve(A, 9)
    contents.reserve(B, 9)
    contents.step([(A, 0, [1, 2, 3, 4])])
    contents.share_prefix(A, B, 3)
    contents.remove(A, 1, 2)
    contents.failing_step([(B, 2, [9])])
    assert contents.values == {(A, 0): 1, (A, 1): 4, (B, 0): 1, (B, 1): 2}
    with pytest.raises(Impossible, match="a gap before position 3 of 1"):
        contents.step([(A, 3, [5])])


def test_a_cache_with_every_operation_agrees_and_the_run_comes_far() -> None:
    case: Any = testing.machine(CellsCache, examples=150, steps=50, seed=1)
    case("runTest").debug()
    many = {
        "sharer copies, rows kept": 30,
        "donor copies, rows kept": 20,
        "donor copies again": 3,
        "orphan of two readers or more": 10,
        "remove beside readers": 10,
        "compaction that moved an orphan": 10,
        "compaction with a move upwards": 20,
        "copy above a share": 5,
    }
    few = {name: n for name in many if (n := case.tally[name, "seen"]) < many[name]}
    assert not few
    operations = {name for name, outcome in case.tally if outcome == "done"}
    assert operations >= {"append", "write", "failing_step", "shift", "resize_with_defrag"}


class KeepsNoTail(CellsCache):
    """Copy-on-write forgets the rows above what is written."""

    def step(self, groups: Sequence[Group]) -> Any:
        before = {seq: self.cells_of(seq) for seq, _, _ in groups if seq in self.layout.seqs}
        cells = list(self.cells)
        moves = super().step(groups)
        for seq, t, values in groups:
            for old, new in list(zip(before[seq], self.cells_of(seq), strict=False))[
                t + len(values) :
            ]:
                if old != new:
                    self.cells[new] = cells[new]
        return moves


class ForgetsReaders(CellsCache):
    """A donor is cut: what others read of it goes with it."""

    def release(self, seq: int) -> None:
        cells = self.cells_of(seq) if seq in self.layout.seqs else []
        super().release(seq)
        for cell in cells:
            self.cells[cell] = 0


class TakesTheHighest(CellsCache):
    """Not the lowest gap, for a sequence that is new to it."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: set[int] = set()

    def reserve(self, seq: int, cap: int) -> Any:
        slot = super().reserve(seq, cap)
        gap = self.layout.gaps()[-1:]
        if gap and gap[0][1] >= cap and self.written(seq) == 0 and seq not in self.placed:
            self.layout.runs[slot.run].start = gap[0][0]
        self.placed.add(seq)
        return self.slot(slot.run)


class RefusesTooMuch(CellsCache):
    """A share of a sharer is refused."""

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        if src in self.layout.seqs and self.layout.seqs[src].share:
            raise Refusal("5.4", "one reader is enough")
        super().share_prefix(src, dst, rows)


class RefusesTooLate(CellsCache):
    """A refused truncation has changed something."""

    def truncate(self, seq: int, rows: int) -> None:
        self.cells[-1] += rows > self.contents.written.get(seq, 0)
        super().truncate(seq, rows)


class RefusesTooLittle(CellsCache):
    """Rows that others read are removed."""

    def remove(self, seq: int, start: int, length: int) -> None:
        try:
            super().remove(seq, start, length)
        except Refusal as refusal:
            if "others read" not in refusal.message:
                raise


class CitesAnotherRule(CellsCache):
    """Every refusal of a share cites the rule of copies."""

    def share_prefix(self, src: int, dst: int, rows: int) -> None:
        try:
            super().share_prefix(src, dst, rows)
        except Refusal as refusal:
            raise Refusal("5.8", refusal.message) from None


class Miscounts(CellsCache):
    """Orphans count as reserved."""

    def stats(self) -> Any:
        stats = super().stats()
        stats.reserved += stats.orphaned
        return stats


class MovesInAnyOrder(CellsCache):
    """The moves of a compaction are told from the top down."""

    def defrag(self, need: int | None) -> Any:
        return super().defrag(need)[::-1]


FAULTS: list[tuple[type[CellsCache], str]] = [
    (KeepsNoTail, r"sequence \d reads \[.*; it must read"),
    (ForgetsReaders, r"sequence \d reads \[.*; it must read"),
    (TakesTheHighest, "cells are owned by"),
    (RefusesTooMuch, "share_prefix is refused, and nothing speaks against it"),
    (RefusesTooLate, "truncate was refused and changed something"),
    (RefusesTooLittle, r"remove is not refused: others read \d rows of \d"),
    (CitesAnotherRule, r"cites 5.8; it must be of \('5.4', '2.5'\)"),
    (Miscounts, "statistics are"),
    (MovesInAnyOrder, r"moves \(run, src, dst, rows\)"),
]


def found(make: type[CellsCache], message: str, *phases: Phase) -> list[str]:
    """The calls that the machine shows for a fault; run again, the last one shows it too."""
    case: Any = testing.machine(make, examples=300, steps=30, seed=2)
    case.settings = settings(case.settings, phases=phases)
    with pytest.raises(AssertionError, match=message) as caught:
        case("runTest").debug()
    (note,) = [n for n in caught.value.__notes__ if n.startswith("after these calls:")]
    *before, last = note.splitlines()[1:]
    names = {"checked": testing.Checked(make())}
    exec("\n".join(before), names)
    with pytest.raises(AssertionError, match=message):
        exec(last, names)
    return [*before, last]


@pytest.mark.parametrize(("make", "message"), FAULTS, ids=[make.__name__ for make, _ in FAULTS])
def test_a_fault_is_found(make: type[CellsCache], message: str) -> None:
    assert found(make, message, Phase.generate)


def test_a_failure_is_shown_by_few_calls() -> None:
    calls = found(ForgetsReaders, "must read", Phase.generate, Phase.shrink)
    assert len(calls) <= 8 and calls[-1].startswith("checked.release("), calls


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_cache_of_the_page_passes_and_its_fault_is_found() -> None:
    names: dict[str, Any] = {"__name__": "test_my_cache"}
    exec(compile(examples()[0], str(PAGE), "exec"), names)
    case = names["TestListCache"]
    case("runTest").debug()
    assert case.tally["share_prefix", "done"] > 10
    names = {"__name__": "test_my_cache"}
    faulty = examples()[0].replace("self.rows[src][:rows]", "self.rows[src]")
    assert faulty != examples()[0]
    exec(compile(faulty, str(PAGE), "exec"), names)
    with pytest.raises(AssertionError, match=r"it must read") as caught:
        names["TestListCache"]("runTest").debug()
    assert "checked.share_prefix" in "".join(caught.value.__notes__)


def test_the_failure_that_the_page_shows_is_one() -> None:
    names: dict[str, Any] = {"__name__": "test_my_cache"}
    faulty = examples()[0].replace("self.rows[src][:rows]", "self.rows[src]")
    exec(compile(faulty, str(PAGE), "exec"), names)
    with pytest.raises(AssertionError) as caught:
        exec(compile(examples()[1], str(PAGE), "exec"), names)
    assert str(caught.value) in PAGE.read_text()


def test_without_hypothesis_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "minfer.testing.rules", raising=False)
    with pytest.raises(Refusal, match=r"pip install 'minfer\[testing\]'") as caught:
        testing.machine(CellsCache)
    assert caught.value.facts == {"missing": "hypothesis"}


def test_models_and_protocol_need_neither_hypothesis_nor_numpy() -> None:
    code = (
        "import sys, minfer.testing as t; t.Checked, t.Cache; "
        "print(*({'hypothesis', 'numpy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PAGE.parent.parent, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_command_runs_a_cache_of_ones_own() -> None:
    command = [sys.executable, "-m", "minfer.testing"]
    options = ["--examples", "10", "--steps", "10", "--seed", "3"]
    done = subprocess.run(
        [*command, "toy_caches:CellsCache", *options],
        cwd=PAGE.parent.parent,
        env={"PYTHONPATH": ".:tests"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "10 caches, up to 10 calls each, seed 3: no contradiction" in done.stdout


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nosuch:make", "'nosuch:make' names no function: No module named 'nosuch'"),
        ("json:nope", "module 'json' has no attribute 'nope'"),
        (":make", "give module:function"),
    ],
)
def test_a_cache_that_is_not_there_is_refused(
    target: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["testing", target])
    assert importlib.import_module("minfer.testing.__main__").main() == 2
    assert said in capsys.readouterr().err


def test_the_command_takes_what_a_cache_refuses_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_my_cache.py").write_text(examples()[0])
    monkeypatch.syspath_prepend(tmp_path)
    cache = "test_my_cache:ListCache"
    command = importlib.import_module("minfer.testing.__main__")
    options = ["--examples", "20", "--steps", "10", "--refusals"]
    monkeypatch.setattr(sys, "argv", ["testing", cache, *options, "ValueError"])
    assert command.main() == 0
    assert "20 caches" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["testing", cache, *options, "print"])
    assert command.main() == 2
    assert "'print' names no exception" in capsys.readouterr().err
