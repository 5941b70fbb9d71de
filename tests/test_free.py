"""The free list of the cell store."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.kv.free import FreeCells


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_first_fit_agrees_with_a_scan(n_cells: int, rng: random.Random) -> None:
    free, owned = FreeCells(n_cells), [False] * n_cells
    held: list[tuple[int, int]] = []
    for _ in range(60):
        n = rng.randint(1, max(1, n_cells // 3))
        fits = [c for c in range(n_cells - n + 1) if not any(owned[c : c + n])]
        assert free.first_fit(n) == (fits[0] if fits else None)
        if fits and rng.random() < 0.6:
            start = rng.choice(fits)
            free.take(start, n)
            held.append((start, n))
            owned[start : start + n] = [True] * n
        elif held:
            start, n = held.pop(rng.randrange(len(held)))
            free.give(start, n)
            owned[start : start + n] = [False] * n
        edges = [c for c in range(n_cells) if not owned[c] and (c == 0 or owned[c - 1])]
        assert [start for start, _ in free.runs()] == edges
        assert [free.length_at(c) > 0 for c in range(n_cells)] == [
            c in edges for c in range(n_cells)
        ]
        assert free.cells == owned.count(False)
        assert free.largest == max((n for _, n in free.runs()), default=0)


def test_taking_cells_that_are_not_free_is_a_bug() -> None:
    free = FreeCells(8)
    free.take(0, 4)
    for start, n in ((0, 1), (3, 2), (4, 5)):
        with pytest.raises(AssertionError, match="are not all free"):
            free.take(start, n)


def test_a_trial_leaves_nothing_behind() -> None:
    free = FreeCells(12)
    free.take(2, 3)
    free.take(8, 2)
    before = free.runs()
    with free.trial():
        free.give(2, 3)
        assert free.first_fit(8) == 0
        free.take(1, 4)
        free.give(8, 2)
        assert free.runs() == [(0, 1), (5, 7)]
    assert free.runs() == before
    assert (free.cells, free.largest) == (7, 3)
