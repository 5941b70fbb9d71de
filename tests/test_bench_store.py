"""What the benchmark says of the cell store is checked first: wrong rows and wrong counts show."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer.errors import Refusal
from minfer.kv import removal
from minfer.kv.arena import Arena
from minfer.kv.cells import CellTables
from minfer.kv.free import FreeCells
from tuning.bench import checks
from tuning.bench.cases import Work
from tuning.bench.store_cases import Store, Tables
from tuning.columns import ours_store, ours_tables
from tuning.figures import tables as figures

STORE, TABLES = Store(1, 24, 2, 32), Tables(10)


def store_check(fmt: str) -> checks.Check:
    values = ours_store.store(STORE, {"fmt": fmt, "threads": 1}).values
    return checks.check_ours(STORE, fmt, values, {})


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
def test_rows_that_are_not_moved_are_a_wrong_answer(
    fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_check(fmt).passed
    monkeypatch.setattr(Arena, "move", lambda *_: None)
    wrong = store_check(fmt)
    assert not wrong.passed and not wrong.error < 0.1  # NaN under the sanitizer


def test_keys_that_are_not_turned_are_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arena, "turn_keys", lambda *_: None)
    assert not store_check("q8_0").passed and store_check("f16").passed


def test_every_row_of_the_store_says_what_it_moves() -> None:
    moved = {name: STORE.moved(name) for name in STORE.measures}
    assert moved == {
        "share": 0, "sharer writes": 11, "donor writes": 11, "copy": 24, "defrag": 24,
        "remove": 19, "plain copy": 24,
    }  # fmt: skip
    assert (
        STORE.work("q8_0", "copy") == Work(moved=2 * 24 * 68) and STORE.work("f32", "share") is None
    )
    assert not STORE.takes("f16", "remove") and STORE.takes("q8_0", "remove")
    scene = ours_store.Scene(STORE, {"fmt": "f16", "threads": 1})
    with pytest.raises(Refusal, match=r"5\.7"):
        scene.store.remove(0, 0, 1, rope=None)


@pytest.mark.parametrize("name", ["sharer writes", "donor writes", "copy", "defrag", "remove"])
def test_the_moves_of_the_store_are_those_that_are_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = ours_store.measures(ours_store.Scene(STORE, {"fmt": "f32", "threads": 1}))[name]
    measure.reset()
    seen: list[int] = []
    move = Arena.move

    def counting(arena: Arena, moves: Any) -> None:
        seen.extend(one.rows for one in moves)
        move(arena, moves)

    monkeypatch.setattr(Arena, "move", counting)
    measure.calls[0]()
    assert sum(seen) == STORE.moved(name)


def test_the_tables_do_what_their_rows_are_called() -> None:
    found, must = ours_tables.tables(TABLES, {}).values
    assert np.array_equal(found, must) and len(found) == 23
    assert checks.check_ours(TABLES, "", np.array([found, must]), {}).passed
    assert not checks.check_ours(TABLES, "", np.array([found, must + 1]), {}).passed


def test_a_lost_count_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = removal.remove

    def uncounted(tables: CellTables, *args: Any) -> Any:
        return dataclasses.replace(plan(tables, *args), entries={})

    monkeypatch.setattr(removal, "remove", uncounted)
    values = ours_tables.tables(TABLES, {}).values
    assert not checks.check_ours(TABLES, "", values, {}).passed


def test_tables_that_contradict_themselves_give_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ours_tables.tables(TABLES, {}).measures
    assert made["release"].sample(3) > 0
    give = FreeCells.give
    monkeypatch.setattr(FreeCells, "give", lambda free, start, n: give(free, start, max(1, n - 1)))
    with pytest.raises(AssertionError, match="free"):
        made["release"].sample(3)


def test_every_operation_finds_what_it_needs_again() -> None:
    made = ours_tables.tables(TABLES, {}).measures
    for name in (*made, *reversed(made)):
        made[name].sample(1000)


def small_report(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(figures, "TABLES", (Tables(10), Tables(14)))
    monkeypatch.setattr(figures, "ROUNDS", 2)
    return figures.measure()


def test_the_figure_has_a_time_for_every_operation_and_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = small_report(monkeypatch)
    assert set(report["points"]) == set(TABLES.measures)
    assert all(set(points) == {"10", "14"} for points in report["points"].values())
    assert all(one["median"] > 0 for points in report["points"].values() for one in points.values())
    report["points"]["defrag"]["14"]["median"] = 12.34
    heads, *rows = figures.lines(report)
    assert heads.split() == ["us", "a", "call", "10", "14"] and len(rows) == len(TABLES.measures)
    assert rows[-1].startswith("defrag / n") and rows[-1].endswith("        12.3")


def test_the_figure_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "tables.png"
    figures.draw(small_report(monkeypatch), path)
    assert path.read_bytes().startswith(b"\x89PNG")
