"""What a store saved it holds again after a load, to the bit (contract 8)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from interrupts import interrupted_at
from refusals import refused, state
from session_mutations import HEAD_DIM, empty_store, fill, small_store, write_rows
from stores import FORMATS, A, B, C, Told, assert_clear, make_store

from minfer.errors import Damaged, Refusal
from minfer.kv.batch import Batch
from minfer.kv.plan import make_plan
from minfer.kv.runs import LastRow
from minfer.kv.session import pieces, reading
from minfer.kv.store import KvStore

Fill = Callable[[Told], None]
SHAPES = [  # n_layer, n_head_kv, head_dim
    *(("f32", 1, 1, 1), ("f32", 3, 2, 7), ("f16", 2, 1, 3), ("f16", 3, 5, 3), ("f16", 1, 2, 64)),
    *(("q8_0", 2, 1, 32), ("q8_0", 3, 3, 32), ("q8_0", 1, 2, 64)),
]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not wait."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def rows_of(store: KvStore) -> dict[tuple[int, int, str], bytes]:
    """The readable cells by sequence, layer and which."""
    return {
        (seq, layer, which): store.export_cells(seq, layer, which).tobytes()
        for seq in store.sequences()
        for layer in range(store.n_layer)
        for which in "kv"
    }


def assert_same(store: KvStore, saved: KvStore) -> None:
    store.check()
    assert_clear(store)
    assert store.digest() == saved.digest()
    assert store.stats() == saved.stats()
    assert rows_of(store) == rows_of(saved)


# --- what goes through a file ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_comes_back(shape: tuple[str, int, int, int], tmp_path: Path) -> None:
    fmt, n_layer, *heads = shape
    saved, store = (
        KvStore(n_layer, 24, *heads, cache_type=fmt, threads=1, sanitize=True) for _ in range(2)
    )
    fill(saved)
    fill_otherwise(store)
    before = state(saved)
    saved.save(tmp_path / "a.kv", b"of the host\x00\xff")
    assert state(saved) == before, "a save changes nothing"
    loaded = store.load(tmp_path / "a.kv")
    assert (loaded.host, loaded.bitwise, loaded.differs) == (b"of the host\x00\xff", True, "")
    assert_same(store, saved)
    store.save(tmp_path / "b.kv", loaded.host)
    assert (tmp_path / "b.kv").read_bytes() == (tmp_path / "a.kv").read_bytes()


def fill_otherwise(store: KvStore) -> None:
    """Every cell but one, so that a load has something to replace everywhere."""
    store.reserve(9, store.n_ctx - 1)
    write_rows(store, 9, 0, store.n_ctx - 1)


def nothing(told: Told) -> None:
    """An empty store."""


def unwritten(told: Told) -> None:
    told.reserve(A, 3)
    told.reserve(B, 2)


def full(told: Told) -> None:
    told.reserve(A, 10, rows=10)
    told.reserve(B, 6, rows=6)


def defragged(told: Told) -> None:
    for seq, cap in ((C, 3), (A, 4), (B, 5)):
        told.reserve(seq, cap, rows=cap)
    told.release(C)
    told.store.defrag()


def truncated(told: Told) -> None:
    """A donor below what its reader reads, and a sharer below its own rows."""
    told.reserve(A, 6, rows=5)
    told.reserve(B, 4)
    told.share(A, B, 4)
    told.write((B, 4, 2))
    told.truncate(A, 2)
    told.truncate(B, 5)


def parted(told: Told) -> None:
    """A sharer and a donor that wrote below what was shared."""
    told.reserve(A, 4, rows=4)
    for seq in (B, C):
        told.reserve(seq, 3)
        told.share(A, seq, 3)
    told.write((B, 2, 1))
    told.write((A, 1, 1))


def orphaned(told: Told) -> None:
    told.reserve(A, 6, rows=5)
    told.reserve(B, 4)
    told.share(A, B, 3)
    told.release(A)
    told.write((B, 3, 1))


def removed(told: Told) -> None:
    told.reserve(A, 8, rows=7)
    told.reserve(B, 3)
    told.share(A, B, 2)
    told.remove(A, 3, 2)


CASES = (nothing, unwritten, full, defragged, truncated, parted, orphaned, removed)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_state_comes_back(case: Fill, fmt: str, tmp_path: Path) -> None:
    if case is removed and fmt == "f16":
        pytest.skip("rows are not removed from f16")
    told = Told(fmt, n_layer=2, sanitize=True)
    case(told)
    told.store.save(tmp_path / "a.kv")
    saved, told.store = told.store, make_store(fmt, 16, 2, sanitize=True)
    fill_otherwise(told.store)
    told.store.load(tmp_path / "a.kv")
    assert_same(told.store, saved)
    told.check()
    told.store.save(tmp_path / "b.kv")
    assert (tmp_path / "b.kv").read_bytes() == (tmp_path / "a.kv").read_bytes()
    for seq in told.store.sequences():  # and goes on
        if told.store.tables.cap(seq) > told.store.written(seq):
            told.attend((seq, told.store.written(seq), 1), kind="decode")


def test_small_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of one row, of a part of a run, and of several runs."""
    saved = small_store("f32")
    saved.save(tmp_path / "a.kv")
    for size in (1, 32, 48, 80, 128):
        for module in (pieces, reading):
            monkeypatch.setattr(module, "PIECE_BYTES", size)
        saved.save(tmp_path / "b.kv")
        assert (tmp_path / "b.kv").read_bytes() == (tmp_path / "a.kv").read_bytes(), size
        store = empty_store("f32", sanitize=True)
        store.load(tmp_path / "a.kv")
        assert_same(store, saved)


# --- last rows ------------------------------------------------------------------------------------

LAST = LastRow(11, "decode", 2**63 + 1)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("nothing", LAST),
        ("truncate to as many", LAST),
        ("truncate", None),
        ("remove", None),
        ("a row from outside", None),
        ("part from readers", LastRow(12, "prefill", 5)),
        ("part from readers, without a model", None),
        ("defrag", LAST),
        ("share", LAST),
    ],
)
def test_last_rows_are_kept_while_they_are_the_last(
    name: str, kept: LastRow | None, tmp_path: Path
) -> None:
    store = empty_store("f32")
    store.reserve(8, 1)
    for seq in (A, B):
        store.reserve(seq, 6)
    write_rows(store, A, 0, 4, LAST)
    changes = {
        "nothing": lambda: None,
        "truncate to as many": lambda: store.truncate(A, 4),
        "truncate": lambda: store.truncate(A, 3),
        "remove": lambda: store.remove(A, 1, 1, rope=None),
        "a row from outside": lambda: store.import_rows(A, *np.ones((2, 2, 1, 1, 4), np.float32)),
        "part from readers": lambda: part(LastRow(12, "prefill", 5)),
        "part from readers, without a model": lambda: part(None),
        "defrag": lambda: (store.release(8), store.defrag()),
        "share": lambda: store.share_prefix(A, B, 4),
    }

    def part(last: LastRow | None) -> None:
        store.share_prefix(A, B, 4)
        write_rows(store, A, 3, 1, last)

    changes[name]()
    store.save(tmp_path / "a.kv")
    store.load(tmp_path / "a.kv")
    assert store.tables.entries[A].last == kept
    assert store.tables.entries[B].last is None


# --- what a load does to the store ----------------------------------------------------------------


@pytest.fixture(params=HEAD_DIM)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KvStore:
    """The small store, saved as a.kv and another one as b.kv."""
    made, other = (small_store(request.param, sanitize=True) for _ in range(2))
    made.save(tmp_path / "a.kv", b"a")
    fill_more(other)
    other.save(tmp_path / "b.kv", b"b")
    return made


def fill_more(store: KvStore) -> None:
    store.release(1)
    store.reserve(9, 3)
    write_rows(store, 9, 0, 2)


def test_plans_made_before_are_stale(store: KvStore, tmp_path: Path) -> None:
    generation = store.generation
    plan = make_plan(store.tables, Batch([1], [4], "decode"))
    store.load(tmp_path / "a.kv")
    assert store.generation > generation
    refused(store, "5.5", lambda: store.tables.refuse_stale(plan.begin), "stale")


def test_an_open_step_comes_first(store: KvStore, tmp_path: Path) -> None:
    before = (tmp_path / "a.kv").read_bytes()
    rows = np.zeros((1, 1, store.head_dim), np.float32)
    with store.step(Batch([1], [4], "decode")) as step:
        refused(store, "5.5", lambda: store.save(tmp_path / "a.kv"), "save has to wait", "[1]")
        refused(store, "5.5", lambda: store.load(tmp_path / "b.kv"), "load has to wait", "[1]")
        for layer in range(store.n_layer):
            step.write(layer, k=rows, v=rows)
    assert (tmp_path / "a.kv").read_bytes() == before
    assert store.written(1) == 5


def test_a_step_opened_by_the_host_refuses_the_load(store: KvStore, tmp_path: Path) -> None:
    steps = store.step(Batch([1], [4], "decode"))
    with pytest.raises(Refusal, match="load has to wait"):
        store.load(tmp_path / "b.kv", lambda host: steps.__enter__())
    store.check()
    assert store.sequences() == [1, 2, 3, 4, 6]


def test_the_host_may_refuse(store: KvStore, tmp_path: Path) -> None:
    seen = []

    def accept(host: bytes) -> None:
        seen.append(host)
        raise LookupError("not this one")

    before = state(store)
    with pytest.raises(LookupError, match="not this one"):
        store.load(tmp_path / "b.kv", accept)
    assert state(store) == before
    assert seen == [b"b"]


def test_a_host_that_is_no_bytes_is_refused(store: KvStore, tmp_path: Path) -> None:
    before = (tmp_path / "a.kv").read_bytes()
    for host in ("text", None, 5, np.zeros(3, np.int32)):
        refused(store, "8.1", lambda host=host: store.save(tmp_path / "a.kv", host), "bytes")
    assert (tmp_path / "a.kv").read_bytes() == before


# --- files that change, loads that stop -----------------------------------------------------------


def assert_empty(store: KvStore) -> None:
    store.check()
    assert_clear(store)
    assert store.sequences() == []
    assert store.stats().free_cells == store.n_ctx


def cut(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


CHANGES = {
    "the first row": flipped(-64),
    "the last byte of the rows": flipped(-17),
    "the header": flipped(20),
    "a table": flipped(140),
    "shorter": cut,
    "nothing left": lambda data: b"",
    "the other file": lambda data: data[::-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_read(store: KvStore, tmp_path: Path, change: str) -> None:
    path = tmp_path / "b.kv"

    def accept(host: bytes) -> None:
        path.write_bytes(CHANGES[change](path.read_bytes()))

    with pytest.raises(Damaged, match="was changed while it was read; read it again") as caught:
        store.load(path, accept)
    assert caught.value.rule == "8.2"
    assert "it is empty now" in caught.value.__notes__[0]
    assert_empty(store)
    store.load(tmp_path / "a.kv")
    assert_same(store, small_store(str(store.fmt)))


def test_a_file_that_is_replaced_while_it_is_read(store: KvStore, tmp_path: Path) -> None:
    """The open file is the old one, whole."""
    (tmp_path / "c.kv").write_bytes(b"MINFERPY")
    store.load(tmp_path / "a.kv", lambda host: (tmp_path / "c.kv").replace(tmp_path / "a.kv"))
    assert_same(store, small_store(str(store.fmt)))


@pytest.fixture
def at_lines() -> Iterator[int]:
    """Lines to interrupt at, until one is behind the end."""
    return iter(range(1, 100_000))


@pytest.mark.parametrize("store", ["q8_0"], indirect=True)
def test_an_interrupt_at_any_line_of_a_load(
    store: KvStore, tmp_path: Path, at_lines: Iterator[int]
) -> None:
    """The store is the old one, or empty, or the new one; sound in any case."""
    old, new = small_store("q8_0"), small_store("q8_0")
    fill_more(new)
    identity = store.identity()
    store.identity = lambda: identity
    digests = {old.digest(): old, new.digest(): new}
    seen = set()
    for line in at_lines:
        store.load(tmp_path / "a.kv")
        try:
            with interrupted_at(line):
                store.load(tmp_path / "b.kv")
        except KeyboardInterrupt as stopped:
            notes = getattr(stopped, "__notes__", [])
        else:
            break
        if store.digest() in digests:
            assert_same(store, digests[store.digest()])
            assert not notes
        else:
            assert_empty(store)
            assert notes == ["the store was being filled from the file; it is empty now"]
        seen.add(store.digest())
    assert len(seen) == 3 and line > 500
    assert_same(store, new)


def test_a_lost_store_loads_nothing(store: KvStore, tmp_path: Path) -> None:
    store.tables.lose(RuntimeError("gone"), "make another")
    for call in (store.load, store.save):
        with pytest.raises(Refusal, match="the store is lost"):
            call(tmp_path / "a.kv")
