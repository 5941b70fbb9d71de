"""Every refusal of the cell store: its rule, its words, its numbers, and that nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from refusals import numbers, refused, state
from stores import HEAD_DIM, A, B, C, D, Told, tokens

from minfer.errors import Refusal
from minfer.kv.plan import make_plan
from minfer.kv.store import KvStore
from minfer.rope import Rope

E, F, GHOST = 5, 6, 99  # GHOST: a sequence the store does not know
ROPE = Rope(HEAD_DIM, 10000.0)
Call = Callable[[KvStore], object]


def town() -> Told:
    """A [0, 6) with 5 rows, 4 of them read by B, which wrote 1 into [6, 10); C [10, 13) with 2
    rows; D [13, 15) shares both; E [15, 18) is empty; F [18, 21) has 2; cells [21, 25) are free."""
    told = Told(n_ctx=25, n_layer=2)
    for seq, cap in ((A, 6), (B, 4), (C, 3), (D, 2), (E, 3), (F, 3)):
        told.reserve(seq, cap)
    told.write((A, 0, 5), (C, 0, 2), (F, 0, 2))
    told.share(A, B, 4)
    told.write((B, 4, 1))
    told.share(C, D, 2)
    return told


def case(
    rule: str, call: Call, *said: str | int, prepare: Call | None = None, name: str = ""
) -> object:
    """said: words of the message; numbers among them are facts too."""
    return pytest.param(rule, call, said, prepare, id=name)


def one(method: str, *arguments: object, **keywords: object) -> Call:
    def call(store: KvStore) -> object:
        return getattr(store, method)(*arguments, **keywords)

    call.__name__ = method  # the id of a test
    return call


def write(*groups: tuple[int, int, int]) -> Call:
    """A step that would write its groups; its own rows are of no interest."""

    def call(store: KvStore) -> None:
        batch = tokens(*groups)
        rows = np.zeros((batch.n_tokens, store.n_head_kv, store.head_dim), np.float32)
        with store.step(batch) as step:
            for layer in range(store.n_layer):
                step.write(layer, k=rows, v=rows)

    return call


def after(*calls: Call) -> Call:
    def prepare(store: KvStore) -> None:
        for call in calls:
            call(store)

    return prepare


def check(rule: str, call: Call, said: tuple[str | int, ...], prepare: Call | None) -> None:
    store = town().store
    if prepare is not None:
        prepare(store)
    stats = store.stats()
    error = refused(store, rule, lambda: call(store), *map(str, said))
    assert {fact for fact in said if isinstance(fact, int)} <= numbers(error), error.facts
    assert store.stats() == stats


# --- tables ---------------------------------------------------------------------------------------

PLACES = [
    case("5.2", one("reserve", GHOST, 5), 5, 4, name="reserve: more than is free"),
    case("5.2", one("reserve", A, 7), "resize", 7, 6, name="reserve: held, and larger"),
    case("5.2", one("reserve", B, 5), "resize", 5, 4, name="reserve: a sharer's own run"),
    case("2.5", one("release", GHOST), GHOST, name="release: unknown"),
    case("5.11", one("truncate", A, 6), 5, 6, name="truncate: more than written"),
    case("2.5", one("truncate", GHOST, 0), GHOST, name="truncate: unknown"),
    case("5.3", one("resize", A, 4), 5, 4, name="resize: below its rows"),
    case("5.3", one("resize", A, 3), 4, 3, prepare=one("truncate", A, 1),
         name="resize: below its readers' rows"),
    case("5.3", one("resize", B, 1), 2, 1, prepare=write((B, 5, 1)),
         name="resize: below private rows"),
    case("5.3", one("resize", A, 7), 7, name="resize: into a neighbour"),
    case("5.3", one("resize", F, 8), 8, name="resize: past the arena"),
    case("2.5", one("resize", GHOST, 1), GHOST, name="resize: unknown"),
    case("5.3", one("resize_with_defrag", A, 11), 11, 4, name="resize_with_defrag: more than free"),
    case("5.3", one("resize_with_defrag", A, 4), 5, 4, name="resize_with_defrag: below its rows"),
    case("2.5", one("resize_with_defrag", GHOST, 4), GHOST, name="resize_with_defrag: unknown"),
    case("5.3", one("reserve_with_defrag", GHOST, 5), 5, 4, name="reserve_with_defrag: no room"),
    case("5.2", one("reserve_with_defrag", A, 7), "resize", 7, 6,
         name="reserve_with_defrag: held, and larger"),
    case("5.6", one("defrag", 5), 5, 4, "shrink them", name="defrag: more than is free"),
]  # fmt: skip

SHARES = [
    case("5.4", one("share_prefix", A, E, 0), 0, name="share: no rows"),
    case("5.4", one("share_prefix", A, A, 1), "both", A, name="share: with itself"),
    case("5.4", one("share_prefix", E, E, 1), "both", E, name="share: empty with itself"),
    case("5.4", one("share_prefix", A, E, 6), 6, 5, name="share: more than written"),
    case("5.4", one("share_prefix", E, GHOST, 1), prepare=one("reserve", GHOST, 2),
         name="share: an empty source"),
    case("5.4", one("share_prefix", B, E, 5), 5, 4, name="share: more than the source shares"),
    case("5.4", one("share_prefix", B, E, 4), 4, 3, prepare=one("truncate", B, 3),
         name="share: more than a truncated source shares"),
    case("5.4", one("share_prefix", A, E, 3), 3, 1, prepare=one("truncate", A, 1),
         name="share: more than a truncated donor has"),
    case("5.4", one("share_prefix", A, F, 1), F, 2, name="share: target has rows"),
    case("5.4", one("share_prefix", C, B, 1), B, name="share: target shares already"),
    case("5.4", one("share_prefix", A, D, 2), D, name="share: target shares another run"),
    case("5.4", one("share_prefix", C, A, 1), A, prepare=one("truncate", A, 0),
         name="share: others read the target"),
    case("5.4", one("share_prefix", B, A, 2), A, prepare=one("truncate", A, 0),
         name="share: back to the donor"),
    case("2.5", one("share_prefix", GHOST, E, 1), GHOST, name="share: unknown source"),
    case("2.5", one("share_prefix", A, GHOST, 1), GHOST, name="share: unknown target"),
]  # fmt: skip

COPIES = [
    case("5.8", one("copy_prefix", A, E, 0), 0, name="copy: no rows"),
    case("5.8", one("copy_prefix", A, A, 5), "both", A, name="copy: onto itself"),
    case("5.8", one("copy_prefix", A, F, 6), 6, 5, name="copy: more than written",
         prepare=after(one("truncate", F, 0), one("resize", F, 7))),
    case("5.8", one("copy_prefix", A, E, 4), 4, 3, name="copy: more than the target holds"),
    case("5.8", one("copy_prefix", A, F, 3), F, 2, name="copy: target has rows"),
    case("5.8", one("copy_prefix", A, B, 5), B, name="copy: target has private rows"),
    case("5.8", one("copy_prefix", A, D, 3), D, name="copy: target shares another run"),
    case("5.8", one("copy_prefix", E, GHOST, 1), prepare=one("reserve", GHOST, 2),
         name="copy: an empty source"),
    case("5.8", one("copy_prefix", C, A, 2), A, prepare=one("truncate", A, 0),
         name="copy: others read the target"),
    case("5.8", one("copy_prefix", A, E, 2), 2, 3, prepare=one("share_prefix", A, E, 3),
         name="copy: fewer than the target shares"),
    case("5.8", one("copy_prefix", B, E, 5), E, name="copy: source left the run they shared",
         prepare=after(one("share_prefix", B, E, 4), write((B, 3, 1)))),
    case("2.5", one("copy_prefix", GHOST, E, 1), GHOST, name="copy: unknown source"),
    case("2.5", one("copy_prefix", A, GHOST, 1), GHOST, name="copy: unknown target"),
]  # fmt: skip

REMOVALS = [
    case("5.7", one("remove", B, 0, 1, rope=ROPE), 4, B, name="remove: in a share"),
    case("5.7", one("remove", B, 3, 2, rope=ROPE), 4, B, name="remove: into a share"),
    case("5.7", one("shift", B, 1, rope=ROPE), 4, B, name="shift: a sharer"),
    case("5.7", one("remove", A, 0, 1, rope=ROPE), 4, A, name="remove: rows others read"),
    case("5.7", one("remove", A, 3, 2, rope=None), 4, A, name="remove: into rows others read"),
    case("5.7", one("shift", A, 5, rope=ROPE), 4, A, name="shift: a donor"),
    case("5.7", one("remove", A, 4, 2, rope=ROPE), 5, A, name="remove: past the end"),
    case("5.7", one("remove", A, 5, 1, rope=ROPE), 5, A, name="remove: from the end"),
    case("5.7", one("remove", F, 1, 2**31 - 1, rope=None), F, name="remove: far past the end"),
    case("5.7", one("remove", F, 3, 1, rope=ROPE), 2, F, name="remove: beyond the end"),
    case("5.7", one("remove", F, 1, 0, rope=ROPE), 0, name="remove: nothing"),
    case("5.7", one("shift", F, 0, rope=ROPE), 0, name="shift: nothing"),
    case("2.5", one("remove", GHOST, 0, 1, rope=ROPE), GHOST, name="remove: unknown"),
    case("2.5", one("shift", GHOST, 1, rope=None), GHOST, name="shift: unknown"),
]  # fmt: skip

STEPS = [
    case("5.5", write((A, 6, 1)), 6, 5, name="step: a gap"),
    case("5.5", write((D, 3, 1)), 3, 2, name="step: a gap behind a share"),
    case("2.5", write((A, 5, 2)), 6, name="step: past its run"),
    case("2.5", write((B, 5, 4)), "cells", 8, name="step: past a sharer's run"),
    case("2.5", write((A, 5, 1), (GHOST, 0, 1)), GHOST, name="step: unknown"),
    case("5.5", write((B, 0, 5)), 0, 5, 4, name="step: a sharer without room for the group"),
    case("5.5", write((B, 3, 1)), 3, 5, 4, prepare=write((B, 5, 3)),
         name="step: a sharer without room for its rows"),
    case("5.5", write((A, 1, 1)), 5, 4, 2, prepare=one("resize", F, 5),
         name="step: a donor without a gap"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "call", "said", "prepare"), PLACES + SHARES + COPIES + REMOVALS + STEPS
)
def test_refusals(rule: str, call: Call, said: tuple[str | int, ...], prepare: Call | None) -> None:
    check(rule, call, said, prepare)


# --- numbers that are none ------------------------------------------------------------------------

NO_NUMBERS = (True, False, 1.0, np.float32(1), "1", None, -1, 2**31, 10**30, np.int64(-(2**40)))
ARGUMENTS = [
    ("5.2", "reserve", (GHOST, 1), {}),
    ("5.3", "resize", (A, 6), {}),
    ("5.2", "reserve_with_defrag", (GHOST, 1), {}),
    ("5.3", "resize_with_defrag", (A, 6), {}),
    ("5.11", "truncate", (A, 1), {}),
    ("5.4", "share_prefix", (A, E, 1), {}),
    ("5.8", "copy_prefix", (A, E, 1), {}),
    ("5.7", "remove", (F, 1, 1), {"rope": ROPE}),
    ("5.7", "shift", (F, 1), {"rope": ROPE}),
    ("5.2", "release", (A,), {}),
]
SEQS = {"share_prefix": 2, "copy_prefix": 2}  # leading arguments that are sequence ids


@pytest.mark.parametrize(("rule", "method", "arguments", "keywords"), ARGUMENTS)
def test_no_argument_takes_what_is_no_number(
    rule: str, method: str, arguments: tuple[int, ...], keywords: dict[str, object]
) -> None:
    store = town().store
    for place in range(len(arguments)):
        cited = "5.2" if place < SEQS.get(method, 1) else rule
        for bad in NO_NUMBERS:
            given = (*arguments[:place], bad, *arguments[place + 1 :])
            refused(store, cited, partial(getattr(store, method), *given, **keywords), repr(bad))
    getattr(store, method)(*arguments, **keywords)  # the good numbers of this row


def test_defrag_wants_a_number_of_cells() -> None:
    store = town().store
    for bad in NO_NUMBERS:
        if bad is not None:
            refused(store, "5.6", partial(store.defrag, bad), repr(bad))


def test_numpy_integers_are_numbers() -> None:
    store, plain = town().store, town().store
    store.resize(np.int32(A), np.uint8(5))
    store.share_prefix(np.int64(A), np.int16(E), np.int64(3))
    assert store.spans(E) == [(0, 0, 3), (3, 15, 3)]
    store.remove(np.int64(F), np.int8(0), np.uint16(1), rope=ROPE)
    plain.remove(F, 0, 1, rope=ROPE)
    np.testing.assert_array_equal(store.export(F, 0), plain.export(F, 0))
    assert store.defrag(np.int64(2)) == []


# --- settings, open steps, stale plans ------------------------------------------------------------


def test_compaction_that_is_turned_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "MINFER_NO_KV_DEFRAG"
    store = town().store
    store.release(D)
    store.release(C)
    for value in ("yes", "true", "2"):
        monkeypatch.setenv(flag, value)
        refused(store, "9.5", lambda: store.defrag(), flag, value)
    monkeypatch.setenv(flag, "1")
    refused(store, "5.6", lambda: store.defrag(), flag)
    refused(store, "5.6", lambda: store.defrag(9), flag)
    refused(store, "5.3", lambda: store.reserve_with_defrag(GHOST, 8), flag, "8")
    refused(store, "5.3", lambda: store.resize_with_defrag(B, 10), flag, "10")
    monkeypatch.setenv(flag, "0")
    assert store.resize_with_defrag(B, 10)[1] != []


OPERATIONS = [
    one("reserve", GHOST, 1),
    one("reserve", A, 6),
    one("release", A),
    one("truncate", A, 5),
    one("resize", A, 6),
    one("reserve_with_defrag", GHOST, 1),
    one("resize_with_defrag", A, 6),
    one("defrag"),
    one("share_prefix", A, E, 1),
    one("copy_prefix", A, E, 1),
    one("remove", F, 1, 1, rope=ROPE),
    one("shift", F, 1, rope=None),
    write((C, 2, 1)),
    lambda store: store.import_rows(C, *np.zeros((2, 2, 1, 2, HEAD_DIM), np.float32)),
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_change_waits_for_the_end_of_a_step(operation: Call) -> None:
    store = town().store
    rows = np.zeros((2, store.n_head_kv, HEAD_DIM), np.float32)
    with store.step(tokens((A, 5, 1), (B, 5, 1))) as step:
        step.write(0, k=rows, v=rows)
        before = state(store)
        with pytest.raises(Refusal, match="open") as caught:
            operation(store)
        assert caught.value.rule == "5.5"
        assert [A, B] in caught.value.facts.values()
        assert state(store) == before
        assert store.written(C) == 2 and store.spans(E) == [(0, 15, 3)], "reading is free"
        assert store.export(D, 0).shape == (2, 2, HEAD_DIM)
        step.write(1, k=rows, v=rows)
    operation(store)


CHANGES = [
    one("reserve", GHOST, 1),
    one("release", E),
    one("truncate", C, 1),
    one("resize", A, 5),
    one("share_prefix", A, E, 1),
    one("copy_prefix", A, E, 1),
    one("remove", F, 1, 1, rope=ROPE),
    write((C, 1, 1)),
    after(one("release", C), one("defrag")),
    after(one("release", C), one("release", D), one("resize_with_defrag", B, 12)),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_stale_after_any_change(change: Call) -> None:
    store = town().store
    plan = make_plan(store._tables, tokens((A, 2, 1)))
    generation = store.generation
    change(store)
    assert store.generation > generation
    error = refused(store, "5.5", lambda: store._begin(plan), "stale")
    assert {generation, store.generation} <= numbers(error)
