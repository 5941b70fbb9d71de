"""Plans of steps over the tables of the cell store (contract 2.5, 2.6, 5.5)."""

from __future__ import annotations

from functools import partial

from cell_tables import Tables, feed
from refusals import refused

from minfer.kv.batch import Batch
from minfer.kv.runs import (
    Entry,
)
from minfer.window import WindowMode


def test_a_plan_resolves_every_group() -> None:
    tables = Tables(16)
    tables.reserve(1, 6)
    tables.reserve(2, 6)
    feed(tables, 2, 3)
    plan = tables.plan(Batch([2, 2, 1], [3, 4, 0], "prefill"))
    assert plan.cells == (range(9, 11), range(0, 1))
    assert plan.spans == (((0, 6, 6),), ((0, 0, 6),))
    assert plan.after == (Entry(1, 5), Entry(0, 1))
    assert plan.mode is WindowMode.SPAN
    assert plan.moves == ()
    assert plan.begin.generation == tables.generation
    assert tables.written(2) == 3, "planning changes nothing"


def test_rows_become_readable_at_the_commit() -> None:
    tables = Tables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 3)
    plan = tables.plan(Batch([1, 1], [3, 4], "prefill"))
    tables.begin(plan)
    assert tables.written(1) == 3
    tables.tables.commit(plan)
    assert tables.written(1) == 5


def test_a_failed_step_at_the_end_leaves_the_digest() -> None:
    tables = Tables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 3)
    digest, generation = tables.digest(), tables.generation
    plan = tables.plan(Batch([1, 1], [3, 4], "prefill"))
    tables.begin(plan)
    tables.tables.abort(plan)
    assert tables.digest() == digest
    assert tables.generation > generation


def test_overwriting_in_the_middle_keeps_the_tail_and_failing_truncates() -> None:
    tables = Tables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 5)
    feed(tables, 1, 2, t=1)
    assert tables.written(1) == 5
    plan = tables.plan(Batch([1, 1], [1, 2], "prefill"))
    tables.begin(plan)
    assert tables.written(1) == 1
    tables.tables.abort(plan)
    assert tables.written(1) == 1


def test_a_group_may_not_begin_past_the_written_rows() -> None:
    tables = Tables(8)
    tables.reserve(1, 6)
    feed(tables, 1, 2)
    error = refused(tables, "5.5", lambda: tables.plan(Batch([1], [3], "decode")))
    assert error.facts == {"seq": 1, "position": 3, "written": 2}


def test_a_group_may_not_leave_its_run() -> None:
    tables = Tables(8)
    tables.reserve(1, 4)
    feed(tables, 1, 3)
    assert tables.plan(Batch([1], [3], "decode")).cells == (range(3, 4),)
    error = refused(tables, "2.5", lambda: tables.plan(Batch([1, 1], [3, 4], "decode")))
    assert error.facts == {"seq": 1, "position": 4, "cap": 4, "room": 4}
    assert "resize it to 5" in error.message


def test_one_bad_group_refuses_the_whole_batch() -> None:
    tables = Tables(8)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    refused(tables, "5.5", lambda: tables.plan(Batch([1, 2], [0, 1], "prefill")))


def test_a_stale_plan_is_refused() -> None:
    tables = Tables(16)
    tables.reserve(1, 4)
    for change in (
        lambda: tables.reserve(2, 4),
        lambda: feed(tables, 2, 2),
        lambda: tables.truncate(2, 1),
        lambda: tables.release(2),
    ):
        plan = tables.plan(Batch([1], [0], "prefill"))
        change()
        error = refused(tables, "5.5", partial(tables.begin, plan))
        assert error.facts == {"plan": plan.begin.generation, "store": tables.generation}


def test_one_step_is_open_at_a_time() -> None:
    tables = Tables(16)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    plan, other = (tables.plan(Batch([seq], [0], "prefill")) for seq in (1, 2))
    refused(tables, "5.5", lambda: tables.tables.commit(plan))
    tables.begin(plan)
    for call in (
        lambda: tables.plan(Batch([2], [0], "prefill")),
        lambda: tables.begin(other),
        lambda: tables.reserve(3, 1),
        lambda: tables.release(2),
        lambda: tables.truncate(2, 0),
    ):
        error = refused(tables, "5.5", call)
        assert "a step over sequences [1] is open" in error.message
    refused(tables, "5.5", lambda: tables.tables.commit(other))
    before = tables.digest()
    tables.tables.abort(other)  # not the open one: nothing to undo
    assert tables.digest() == before
    tables.tables.commit(plan)
    committed = tables.digest()
    tables.tables.abort(plan)
    assert tables.digest() == committed and tables.written(1) == 1
    refused(tables, "5.5", lambda: tables.tables.commit(plan))
    tables.release(2)


def test_the_window_mode_of_a_plan() -> None:
    tables = Tables(16)
    tables.reserve(1, 4)
    tables.reserve(2, 4)
    assert tables.plan(Batch([1], [0], "prefill")).mode is WindowMode.CAUSAL
    assert tables.plan(Batch([2], [0], "prefill")).mode is WindowMode.SPAN
    assert tables.plan(Batch([1, 2], [0, 0], "prefill")).mode is WindowMode.SPAN
