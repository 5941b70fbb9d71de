"""Windows and tiles: tables and examples of contract 2, literally."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer import window
from minfer.errors import Refusal
from minfer.window import Causal, CellSpan, Runs, Span, WindowMode

DONOR_AND_OWN = [CellSpan(0, 0, 4), CellSpan(4, 4, 3)]


@pytest.mark.parametrize(
    ("size", "mode"), [(0, WindowMode.CAUSAL), (6, WindowMode.SPAN), (24, WindowMode.RUNS)]
)
def test_mode_is_told_by_size(size: int, mode: WindowMode) -> None:
    assert window.mode_of(size, 3) is mode


@pytest.mark.parametrize("size", [1, 3, 5, 7, 12, 23, 25])
def test_other_sizes_are_refused_with_both_legal_ones(size: int) -> None:
    with pytest.raises(Refusal, match="a span has 6, runs have 24") as refused:
        window.mode_of(size, 3)
    assert refused.value.rule == "2.2"


def test_wrap_shapes_the_input() -> None:
    assert isinstance(window.wrap(None, 2), Causal)
    span = window.wrap(np.arange(4, dtype=np.int32), 2)
    assert isinstance(span, Span) and span.array.tolist() == [[0, 1], [2, 3]]
    runs = window.wrap(np.zeros(16, dtype=np.int32), 2)
    assert isinstance(runs, Runs) and runs.array.shape == (2, 4, 2)


@pytest.mark.parametrize(
    ("pos", "runs"), [(2, [(0, 3)]), (4, [(0, 4), (4, 1)]), (5, [(0, 4), (4, 2)])]
)
def test_runs_of_a_share_and_an_own_run(pos: int, runs: list[tuple[int, int]]) -> None:
    assert window.runs(DONOR_AND_OWN, pos) == runs


def test_span_of_one_run() -> None:
    spans = [CellSpan(0, 10, 6)]
    assert window.span(spans, 0) == (10, 11)
    assert window.span(spans, 5) == (10, 16)
    assert window.span(spans, 5, width=2) == (14, 16)


def test_several_spans_are_refused_on_the_span_path() -> None:
    with pytest.raises(Refusal, match="read it through runs") as refused:
        window.span(DONOR_AND_OWN, 2)
    assert refused.value.rule == "2.3"


def test_a_fifth_run_is_refused_never_truncated() -> None:
    spans = [CellSpan(i, 10 * i, 1) for i in range(5)]
    assert window.runs(spans, 3) == [(0, 1), (10, 1), (20, 1), (30, 1)]
    with pytest.raises(Refusal, match="sees 5 runs") as refused:
        window.runs(spans, 4)
    assert refused.value.rule == "2.4"
    assert window.runs(spans, 4, width=4) == [(10, 1), (20, 1), (30, 1), (40, 1)]


@pytest.mark.parametrize("pos", [-1, 7, 100])
def test_positions_outside_the_spans_are_refused(pos: int) -> None:
    with pytest.raises(Refusal, match=f"position {pos} lies outside") as refused:
        window.runs(DONOR_AND_OWN, pos)
    assert refused.value.rule == "2.5"


def test_a_sliding_width_clips_both_modes() -> None:
    assert window.runs(DONOR_AND_OWN, 5, width=3) == [(3, 1), (4, 2)]
    assert window.runs(DONOR_AND_OWN, 5, width=2) == [(4, 2)]
    assert window.runs(DONOR_AND_OWN, 1, width=5) == [(0, 2)]


def test_arrays_follow_the_batch() -> None:
    own = [CellSpan(0, 8, 3)]
    assert window.span_array([(own, [1, 2])]).tolist() == [[8, 10], [8, 11]]
    table = window.runs_array([(DONOR_AND_OWN, [4]), (own, [0])])
    assert table.tolist() == [[[0, 4], [4, 1], [0, 0], [0, 0]], [[8, 1], [0, 0], [0, 0], [0, 0]]]
    assert table.dtype == np.int32
    assert window.span_array([(own, [1, 2])], width=2).tolist() == [[8, 10], [9, 11]]
    clipped = window.runs_array([(DONOR_AND_OWN, [4, 5])], width=2)
    assert clipped[:, :2].tolist() == [[[3, 1], [4, 1]], [[4, 2], [0, 0]]]


def test_tiles_never_mix_groups_and_are_padded() -> None:
    assert window.tiles([5, 2], 4).tolist() == [[0, 4], [4, 1], [5, 2], [0, 0]]
    assert window.tiles([1, 1], 1, decode=True).tolist() == [[0, 1], [1, 1]]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=8), st.integers(1, 33))
def test_tiles_cover_every_query_once(groups: list[int], block_m: int) -> None:
    table = window.tiles(groups, block_m)
    assert len(table) == -(-sum(groups) // block_m) + len(groups)
    used = table[table[:, 1] > 0]
    assert used[:, 1].max() <= block_m
    assert used[:, 0].tolist() == [0, *np.cumsum(used[:, 1])[:-1].tolist()]
    ends = set(np.cumsum(groups).tolist())
    assert ends <= set(np.cumsum(used[:, 1]).tolist())  # a group's end is a tile's end


@pytest.mark.parametrize(("groups", "block_m"), [([2], 0), ([0], 4), ([3, -1], 4)])
def test_impossible_tiles_are_refused(groups: list[int], block_m: int) -> None:
    with pytest.raises(Refusal) as refused:
        window.tiles(groups, block_m)
    assert refused.value.rule == "2.7"


BAD_WINDOWS = {
    "negative cell": Span(np.array([[-1, 3]], np.int32)),
    "empty": Span(np.array([[3, 3]], np.int32)),
    "past the arena": Span(np.array([[5, 9]], np.int32)),
    "longer than the position": Span(np.array([[0, 6]], np.int32)),
    "no run": Runs(np.zeros((1, 4, 2), np.int32)),
    "run past the arena": Runs(np.array([[[6, 3], [0, 0], [0, 0], [0, 0]]], np.int32)),
    "negative length": Runs(np.array([[[0, 4], [4, -1], [0, 0], [0, 0]]], np.int32)),
}


@pytest.mark.parametrize("bad", BAD_WINDOWS.values(), ids=BAD_WINDOWS.keys())
def test_windows_outside_the_arena_are_refused(bad: window.Window) -> None:
    with pytest.raises(Refusal, match="query 0") as refused:
        window.check(bad, np.array([4], np.int32), 8)
    assert refused.value.rule == "2.5"


def test_good_windows_pass() -> None:
    at = np.array([4], np.int32)
    window.check(Span(np.array([[3, 8]], np.int32)), at, 8)
    window.check(Runs(np.array([[[6, 2], [0, 3], [0, 0], [0, 0]]], np.int32)), at, 8)
    window.check(Causal(), at, 5)
    with pytest.raises(Refusal, match="position 4 lies past the last cell, 3"):
        window.check(Causal(), at, 4)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_window_has_one_row_a_query(rows: int) -> None:
    array = np.full((rows, 2), [0, 1], np.int32)
    with pytest.raises(Refusal, match=f"a window of {rows} rows for 2 queries"):
        window.check(Span(array), np.zeros(2, np.int32), 8)


def test_the_last_position_is_one_whose_successor_is_an_int32() -> None:
    last = np.array([2**31 - 2], np.int32)
    window.check(Span(np.array([[3, 8]], np.int32)), last, n_cells=8)
    with pytest.raises(Refusal, match="query 0 is at position 2147483647; the last one is"):
        window.check(Span(np.array([[3, 8]], np.int32)), last + 1, n_cells=8)
