"""Workers: as many as were asked for, on at most the threads there are, for the call alone."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from minfer.errors import Refusal
from minfer.kernels_numba import _workers
from minfer.kernels_numba._jit import kernel
from minfer.kernels_numba._workers import Worker, n_workers, read, run, share


@Worker
@kernel
def count_workers(t: Any, n_threads: Any, pointer: Any) -> int:
    (out,) = read(pointer)
    out[t] = 10 * n_threads + t
    return 0


@Worker
@kernel
def add_up(t: Any, n_threads: Any, pointer: Any) -> int:
    out, totals = read(pointer)
    totals[t] = out.sum()
    return 0


@Worker
@kernel
def fill(t: Any, n_threads: Any, pointer: Any) -> int:
    read(pointer)[0][t] = t + 1
    return 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 40])
def test_every_worker_that_was_asked_for_runs_once(threads: int) -> None:
    before = numba.get_num_threads()
    out = np.zeros(threads + 1)
    run(threads, count_workers, None, (out,))
    assert out.tolist() == [*(10 * threads + t for t in range(threads)), 0]
    assert numba.get_num_threads() == before


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_join_starts_when_all_workers_are_done(threads: int) -> None:
    out, totals = np.zeros(threads), np.zeros(threads)
    run(threads, fill, add_up, (out, totals))
    assert totals.tolist() == threads * [threads * (threads + 1) / 2]


def test_the_mask_is_at_most_the_pool_and_is_restored_when_a_call_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, seen = numba.get_num_threads(), []

    def failing(*_: object) -> None:
        seen.append(numba.get_num_threads())
        raise ValueError("no")

    monkeypatch.setattr(_workers, "_start", failing)
    numba.set_num_threads(1)
    try:
        for threads in (2, 10_000):
            with pytest.raises(ValueError, match="no"):
                run(threads, count_workers, None, (np.zeros(1),))
            assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(pool)
    assert seen == [min(2, pool), pool]


def test_items_are_shared_without_gaps() -> None:
    for n in (0, 1, 7, 64):
        for n_threads in (1, 2, 3, 8):
            parts = [share(t, n_threads, n) for t in range(n_threads)]
            assert [i for begin, end in parts for i in range(begin, end)] == list(range(n))


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", None])
def test_what_is_no_number_of_workers_is_refused(threads: object) -> None:
    with pytest.raises(Refusal, match="is no whole number of at least 1") as caught:
        n_workers(threads)
    assert caught.value.rule == "0.3" and caught.value.facts == {"threads": threads}


def test_a_worker_refuses_types_it_was_not_compiled_for() -> None:
    run(1, count_workers, None, (np.zeros(1),))
    with pytest.raises(TypeError, match="count_workers was compiled for other types"):
        run(1, count_workers, None, (np.zeros(1, np.float32),))
