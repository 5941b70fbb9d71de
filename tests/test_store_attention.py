"""Attention after every operation: near the oracle, and in bits what a sequence alone answers.

Contract 5.5, 6.1. Every history below ends with all sequences asked in one batch and one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from stores import (
    FORMATS,
    HEAD_DIM,
    N_HEAD,
    A,
    B,
    C,
    D,
    Rows,
    Seed,
    Told,
    assert_attends,
    make_store,
    seed_row,
    seed_rows,
    tokens,
)

from minfer.kv.step import Step
from minfer.kv.store import KvStore
from minfer.rope import Rope
from minfer.window import WindowMode

CAUSAL, SPAN, RUNS = WindowMode.CAUSAL, WindowMode.SPAN, WindowMode.RUNS
KINDS = ("prefill", "decode")
FIRST = 9  # a sequence at cell 0, so that no other lies there


def prompt(told: Told, unit: int, rows: int = 5) -> None:
    """A with `rows` * unit rows and room for twice that."""
    told.reserve(A, 2 * rows * unit, rows=rows * unit)


def alone_at_zero(told: Told, unit: int) -> None:
    prompt(told, unit)


def truncated(told: Told, unit: int) -> None:
    prompt(told, unit)
    told.truncate(A, 3 * unit)


def elsewhere(told: Told, unit: int) -> None:
    told.reserve(FIRST, 3)
    prompt(told, unit)


def shared(told: Told, unit: int) -> None:
    told.reserve(FIRST, 3)
    prompt(told, unit)
    told.reserve(B, 5 * unit)
    told.share(A, B, 4 * unit)
    told.reserve(C, 5 * unit)
    told.share(B, C, 2 * unit)
    told.write((B, 4 * unit, unit), (C, 2 * unit, 2 * unit))


def sharer_writes(told: Told, unit: int) -> None:
    shared(told, unit)
    step = told.attend((B, 3 * unit, unit), (C, unit, unit))
    assert [move.rows for move in step.moves] == [unit, 2 * unit]


def donor_writes(told: Told, unit: int) -> None:
    shared(told, unit)
    step = told.attend((A, unit, unit))
    assert [move.rows for move in step.moves] == [3 * unit]
    assert told.store.stats().orphaned == 4 * unit


def donor_and_sharers_write(told: Told, unit: int) -> None:
    shared(told, unit)
    told.attend((C, 2 * unit - 1, 1), (A, unit, 2), (B, 3 * unit, 1), kind="decode")
    assert told.store.stats().copy_on_writes == 3


def truncated_donor_writes(told: Told, unit: int) -> None:
    shared(told, unit)
    told.truncate(A, 2 * unit)
    told.truncate(B, 3 * unit)


def orphaned(told: Told, unit: int) -> None:
    shared(told, unit)
    told.release(A)
    assert told.store.stats().orphaned == 4 * unit


def orphan_of_the_last_reader(told: Told, unit: int) -> None:
    orphaned(told, unit)
    told.release(B)
    assert told.store.stats().orphaned == 2 * unit
    told.attend((C, unit, 1))


def resized(told: Told, unit: int) -> None:
    shared(told, unit)
    told.store.resize(A, 8 * unit)
    told.store.resize(C, 5 * unit + 4)
    told.store.resize(B, 4 * unit)


def compacted(told: Told, unit: int) -> None:
    orphaned(told, unit)
    told.release(FIRST)
    assert len(told.store.defrag()) == 3


def compacted_to_zero(told: Told, unit: int) -> None:
    elsewhere(told, unit)
    told.release(FIRST)
    assert len(told.store.defrag()) == 1


def reserved_with_compaction(told: Told, unit: int) -> None:
    shared(told, unit)
    told.release(FIRST)
    cap = told.store.stats().free_cells
    slot, moves = told.store.reserve_with_defrag(D, cap)
    assert slot.cap == cap and len(moves) == 3
    told.seeds[D] = []


def resized_with_compaction(told: Told, unit: int) -> None:
    shared(told, unit)
    told.release(FIRST)
    _, moves = told.store.resize_with_defrag(B, 5 * unit + told.store.stats().free_cells)
    assert len(moves) == 3


def copied(told: Told, unit: int) -> None:
    shared(told, unit)
    told.reserve(D, 8 * unit)
    told.copy(B, D, 5 * unit)


def forked(told: Told, unit: int) -> None:
    shared(told, unit)
    told.reserve(D, 3 * unit)
    told.share(B, D, 4 * unit)
    told.copy(B, D, 5 * unit)


def removed(told: Told, unit: int) -> None:
    shared(told, unit)
    told.remove(A, 4 * unit, unit // 2 + 1)
    told.remove(C, 3 * unit, 1)


HISTORIES: dict[Callable[[Told, int], None], set[WindowMode]] = {
    alone_at_zero: {CAUSAL},
    truncated: {CAUSAL},
    elsewhere: {SPAN},
    shared: {SPAN, RUNS},
    sharer_writes: {SPAN, RUNS},
    donor_writes: {RUNS},
    donor_and_sharers_write: {RUNS},
    truncated_donor_writes: {RUNS},
    orphaned: {RUNS},
    orphan_of_the_last_reader: {RUNS},
    resized: {SPAN, RUNS},
    compacted: {RUNS},
    compacted_to_zero: {CAUSAL},
    reserved_with_compaction: {CAUSAL, RUNS, SPAN},
    resized_with_compaction: {CAUSAL, RUNS},
    copied: {SPAN, RUNS},
    forked: {SPAN, RUNS},
    removed: {SPAN, RUNS},
}


def ask(told: Told, kind: str, width: int) -> set[WindowMode]:
    """Two rows more of every sequence alone, then one more of all together; the modes seen."""
    seqs = [seq for seq in told.store.sequences() if seq != FIRST]
    modes = set()
    for seq in seqs:
        step = told.attend((seq, told.store.written(seq), 2), kind=kind, width=width)
        modes.add(step.inputs.mode)
    everyone = [(seq, told.store.written(seq), 1) for seq in reversed(seqs)]
    told.attend(*everyone, kind=kind, width=width)
    return modes


def without_removal_of_f16(history: Callable[[Told, int], None], cache_type: str) -> bool:
    return not (history is removed and cache_type == "f16")


CASES = [
    pytest.param(history, cache_type, id=f"{history.__name__}-{cache_type}")
    for history in HISTORIES
    for cache_type in FORMATS
    if without_removal_of_f16(history, cache_type)
]


@pytest.mark.parametrize(("history", "cache_type"), CASES)
def test_answers_after(history: Callable[[Told, int], None], cache_type: str) -> None:
    modes: set[WindowMode] = set()
    for kind, width in zip(KINDS, (0, 3), strict=True):
        told = Told(cache_type, n_ctx=96)
        history(told, 3)
        modes |= ask(told, kind, width)
        modes |= ask(told, KINDS[kind == KINDS[0]], 3 - width)
    assert modes == HISTORIES[history]


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("history", [sharer_writes, donor_writes, orphaned, forked])
def test_answers_over_several_partitions(
    history: Callable[[Told, int], None], cache_type: str
) -> None:
    """Shares of 67 to 268 rows: windows cross a border of 256 keys, and runs end between tiles."""
    for kind, width in (("prefill", 0), ("decode", 0), ("decode", 261)):
        told = Told(cache_type, n_ctx=67 * 30)
        history(told, 67)
        assert ask(told, kind, width) <= {SPAN, RUNS}


@pytest.mark.parametrize("history", [h for h in HISTORIES if h is not removed])
def test_answers_beside_cells_that_hold_nan(history: Callable[[Told, int], None]) -> None:
    for cache_type in ("f16", "q8_0"):
        told = Told(cache_type, n_ctx=96, n_layer=2, sanitize=True)
        history(told, 3)
        ask(told, "decode", 0)
        for seq in list(told.seeds):
            told.release(seq)
        assert told.store.stats().free_cells == 96


@pytest.mark.parametrize("history", HISTORIES)
def test_answers_over_the_other_arrangement(
    history: Callable[[Told, int], None], planes: str
) -> None:
    """Codes and scales in planes of their own; the sequence alone lies in canonical cells."""
    for kind, sanitize in zip(KINDS, (True, False), strict=True):
        told = Told("q8_0", n_ctx=96, n_layer=2, device=planes, sanitize=sanitize)
        assert told.store.layout != make_store("q8_0").layout
        history(told, 3)
        ask(told, kind, 0)


@pytest.mark.parametrize("cache_type", FORMATS)
def test_compaction_between_steps_changes_no_bit(cache_type: str) -> None:
    stores = [Told(cache_type, n_ctx=96) for _ in range(2)]
    for told in stores:
        orphaned(told, 3)
        told.release(FIRST)
    stores[0].store.defrag()
    assert stores[0].store.spans(C) != stores[1].store.spans(C)
    for kind in KINDS:
        groups = [(seq, stores[0].store.written(seq), 2) for seq in (B, C)]
        outs = []
        for told in stores:
            outs.append(answers(told.store, groups, kind)[2])
        np.testing.assert_array_equal(outs[0], outs[1])


def answers(
    store: KvStore, groups: list[tuple[int, int, int]], kind: str
) -> tuple[Step, Rows, Rows]:
    """A step of rows that depend on their position alone, its queries and what they get."""
    batch = tokens(*groups, kind=kind)
    seeds = [Seed(8, pos, 0) for pos in batch.positions]
    q = np.stack([seed_row(seed, N_HEAD, 0) for seed in seeds])
    k, v = seed_rows(seeds, 0)
    with store.step(batch) as step:
        step.write(0, k=k, v=v)
        return step, q, step.attend(0, q=q)


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_answers_after_a_removal_that_turns_keys(cache_type: str, pairing: str) -> None:
    """The oracle reads the stored rows; that they are the turned ones is tested beside removal."""
    told = Told(cache_type, n_ctx=96)
    shared(told, 3)
    store = told.store
    before = store.export(A, 0, "k")
    store.remove(A, 12, 2, rope=Rope(HEAD_DIM, 10000.0), pairing=pairing)
    assert store.written(A) == 13
    assert np.abs(store.export(A, 0, "k")[12] - before[14]).max() > 0.1
    for kind in KINDS:
        groups = [(seq, store.written(seq), 2) for seq in (B, A, C)]
        step, q, out = answers(store, groups, kind)
        for i, (seq, t, n) in enumerate(groups):
            rows = slice(2 * i, 2 * i + n)
            assert_attends(store, step.receipts[0], seq, t, q[rows], out[rows])
