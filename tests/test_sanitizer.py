"""The sanitizer names the cell that a faulty variant or a damaged row got NaN from (5.10)."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import (
    FORMATS,
    HEAD_DIM,
    N_HEAD,
    Rows,
    batch_rows,
    forward,
    make_store,
    scattered,
    tokens,
)

from minfer import Engine, KvStore, registry
from minfer.errors import Refusal
from minfer.format import Int32, KvFormat, Region
from minfer.kv import sanitizer
from minfer.ops import Config, variant

FLAG = "MINFER_SANITIZE_CELLS"


@pytest.fixture
def sanitized(added: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores keep NaN in unwritten cells; the faulty variants below can be asked for."""
    monkeypatch.setenv(FLAG, "1")
    registry.add(sys.modules[__name__])


# --- faulty variants: `rows`, given windows one cell longer ---------------------------------------


def rows_over(op: str, *tensors: Any, config: Config, **scalars: Any) -> Rows:
    config = {"threads": config.get("threads", 1)}
    return registry.select(op, variant="rows").launch(*tensors, **scalars, config=config)


@variant()
def attn_window_past(
    q: Rows,
    k: Region,
    v: Region,
    positions: Int32,
    span: Int32 | None,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config,
) -> Rows:
    wider = None if span is None else span + np.array([0, 1], np.int32)
    args = (q, k, v, positions + 1, wider, tiles)
    return rows_over("attn_window", *args, fmt=fmt, scale=scale, width=width, config=config)


@variant()
def attn_window_below(
    q: Rows,
    k: Region,
    v: Region,
    positions: Int32,
    span: Int32 | None,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config,
) -> Rows:
    wider = span - np.array([1, 0], np.int32)
    args = (q, k, v, positions + 1, wider, tiles)
    wide = width and width + 1
    return rows_over("attn_window", *args, fmt=fmt, scale=scale, width=wide, config=config)


@variant()
def attn_map_past(
    q: Rows,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config,
) -> Rows:
    wider, last = runs.copy(), np.count_nonzero(runs[..., 1], axis=1) - 1
    wider[np.arange(len(runs)), last, 1] += 1
    args = (q, k, v, positions + 1, wider, tiles)
    return rows_over("attn_map", *args, fmt=fmt, scale=scale, width=width, config=config)


@variant()
def attn_map_below(
    q: Rows,
    k: Region,
    v: Region,
    positions: Int32,
    runs: Int32,
    tiles: Int32,
    *,
    fmt: KvFormat,
    scale: float,
    width: int,
    config: Config,
) -> Rows:
    wider = runs.copy()
    wider[:, 0] += np.array([-1, 1], np.int32)
    args = (q, k, v, positions + 1, wider, tiles)
    return rows_over("attn_map", *args, fmt=fmt, scale=scale, width=width, config=config)


# --- what is reported -----------------------------------------------------------------------------


def found(store: KvStore, *words: str, **step: Any) -> dict[str, Any]:
    """The facts of the refusal with which a step ends; it is undone."""
    batch = step.pop("batch")
    with pytest.raises(Refusal) as caught:
        forward(store, batch, **step)
    assert caught.value.rule == "5.10", caught.value
    for word in words:
        assert word in caught.value.message
    assert all(store.written(group.seq) == group.t for group in batch.groups)
    store.check()
    assert pickle.loads(pickle.dumps(caught.value)).facts == caught.value.facts
    return dict(caught.value.facts)


@pytest.mark.usefixtures("sanitized")
@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_read_past_the_window_is_reported(cache_type: str, kind: str) -> None:
    store = scattered(cache_type)
    batch = tokens((2, 6, 2), (1, 5, 1), kind=kind)
    facts = found(store, batch=batch, variant="past")
    line = registry.select("attn_window", variant="past").receipt.line
    assert facts == {
        "layer": 0,
        "row": 2,
        "seq": 1,
        "position": 5,
        "window": [(9, 6)],
        "variant": "attn_window_past",
        "file": f"tests/test_sanitizer.py:{line}",
        "which": "K",
        "cell": 15,
        "inside": False,
        "run": 2,
        "owner": 1,
        "readers": (),
        "cell_position": 6,
        "span": (0, 9, 8),
    }
    found(
        store,
        "layer 0 is not finite at query row 2, position 5 of sequence 1, which sees cells [9, 15)",
        "(attn_window_past, tests/test_sanitizer.py:",
        "because of K cell 15 (unwritten position 6 of sequence 1, run 2; span: 8 from position 0, "
        "cell 9), outside the window: the variant must not read it",
        batch=batch,
        variant="past",
    )
    alone = found(store, "K cell 25", batch=tokens((2, 6, 2), kind=kind), variant="past")
    # Row 0 reads the row that the step stored for row 1.
    assert (alone["row"], alone["seq"], alone["window"]) == (1, 2, [(17, 8)])
    assert (alone["owner"], alone["cell_position"], alone["span"]) == (2, 8, (0, 17, 9))


@pytest.mark.usefixtures("sanitized")
@pytest.mark.parametrize("cache_type", FORMATS)
def test_free_cells_and_cells_of_neighbours_are_told_apart(cache_type: str) -> None:
    store = scattered(cache_type)
    facts = found(store, "K cell 4 (free)", batch=tokens((3, 3, 1)), variant="past")
    assert (facts["seq"], facts["window"], facts["cell"]) == (3, [(0, 4)], 4)
    assert "owner" not in facts
    facts = found(store, "K cell 8 (free)", batch=tokens((1, 5, 1)), variant="below")
    assert facts["window"] == [(9, 6)]
    batch = tokens((2, 6, 1), kind="decode")
    facts = found(store, "unwritten position 7 of sequence 1, run 2;", batch=batch, variant="below")
    assert (facts["cell"], facts["seq"], facts["owner"]) == (16, 2, 1)
    assert (facts["cell_position"], facts["span"]) == (7, (0, 9, 8))


@pytest.mark.usefixtures("sanitized")
@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_runs_are_held_to_their_ends_as_well(cache_type: str, kind: str) -> None:
    store = make_store(cache_type)
    for seq, cap in ((8, 3), (1, 6), (2, 9)):
        store.reserve(seq, cap)
    forward(store, tokens((1, 0, 5)))
    store.share_prefix(1, 2, 4)
    batch = tokens((2, 4, 3), (1, 5, 1), kind=kind)
    facts = found(store, "sees cells [3, 7), [9, 12)", batch=batch, variant="past")
    assert (facts["variant"], facts["row"], facts["seq"]) == ("attn_map_past", 2, 2)
    assert (facts["cell"], facts["owner"], facts["run"]) == (12, 2, 2)
    assert (facts["cell_position"], facts["span"]) == (7, (4, 9, 9))
    facts = found(
        store, "K cell 2 (unwritten position 2 of sequence 8, run 0;", batch=batch, variant="below"
    )
    assert (facts["owner"], facts["row"], facts["window"]) == (8, 0, [(3, 4), (9, 1)])
    damage(store, 0, "v", 5)
    batch = tokens((2, 4, 1), kind=kind)
    facts = found(store, "V cell 5 (position 2 of sequence 1, run 1, read by 2;", batch=batch)
    assert (facts["inside"], facts["owner"], facts["readers"]) == (True, 1, (1, 2))
    assert (facts["cell_position"], facts["span"]) == (2, (0, 3, 6))
    store.release(1)
    facts = found(store, "V cell 5 (position 2 of orphan run 1, read by 2; span: 4", batch=batch)
    assert (facts["owner"], facts["readers"], facts["span"]) == (None, (2,), (0, 3, 4))
    facts = found(store, "K cell 2 (unwritten", batch=batch, variant="below")
    assert facts["owner"] == 8


def damage(store: KvStore, layer: int, which: str, cell: int) -> None:
    """NaN in one cell."""
    region = store.region(layer)["kv".index(which)]
    store.device.package().clear_cells(region, np.array([cell], np.int32), np.nan)


@pytest.mark.usefixtures("sanitized")
@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_was_stored_so_is_reported(cache_type: str, which: str, value: float) -> None:
    store = make_store(cache_type)
    store.reserve(1, 3)
    store.reserve(3, 9)
    forward(store, tokens((1, 0, 2)))
    _, k, v = batch_rows(tokens((3, 0, 8)))
    (k if which == "k" else v)[5, 1, 7] = value
    with store.step(tokens((3, 0, 8))) as step:
        step.write(0, k=k, v=v)
    for kind in ("prefill", "decode"):
        batch = tokens((1, 2, 1), (3, 8, 1), kind=kind)
        facts = found(store, f"{which.upper()} cell 8", "inside the window", batch=batch)
        assert (facts["cell"], facts["row"], facts["seq"]) == (8, 1, 3)
        assert (facts["owner"], facts["cell_position"], facts["readers"]) == (3, 5, (3,))
    assert np.isfinite(forward(store, tokens((1, 2, 1)))).all(), "another sequence is not touched"
    batch = tokens((3, 8, 1))
    assert np.isfinite(forward(store, batch, width=3)).all(), "it slid out of the window"
    facts = found(store, f"{which.upper()} cell 8", batch=batch, width=3, variant="below")
    assert (facts["window"], facts["inside"], facts["readers"]) == ([(9, 3)], False, (3,))


@pytest.mark.usefixtures("sanitized")
def test_where_no_cell_is_to_blame_the_query_or_the_arithmetic_is() -> None:
    store = scattered("f32")
    batch = tokens((2, 6, 2))
    q, *_ = batch_rows(batch)
    q[1, 3, 4] = np.nan
    facts = found(store, "query row 1", "the query itself is", batch=batch, q=q)
    assert (facts["query_is_finite"], facts["seq"], facts["position"]) == (False, 2, 7)
    assert "cell" not in facts
    q[1] = 3e38
    facts = found(store, "query row 1", "the arithmetic overflows", batch=batch, q=q)
    assert facts["query_is_finite"]


@pytest.mark.usefixtures("sanitized")
def test_the_cell_is_found_among_many_by_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 * 1,000 cells that are not finite: 11 halvings, and a launch with none of them."""
    monkeypatch.setattr(sanitizer, "ROWS_AT_ONCE", 100)
    store, launches = make_store("q8_0", n_ctx=1000), []
    store.reserve(1, 700)
    forward(store, tokens((1, 0, 3)))

    def counted(*args: Any, **scalars: Any) -> Rows:
        launches.append(args)
        return attn_window_past(*args, **scalars)

    row = attn_window_past.__minfer_variant__
    monkeypatch.setattr(
        registry, "_added", {"minfer.kernels_numba": [(replace(row, launch=counted), "")]}
    )
    facts = found(store, batch=tokens((1, 3, 1)), variant="past")
    assert facts["cell"] == 4
    assert len(launches) <= 1 + 1 + 11
    damage(store, 0, "v", 1)
    assert found(store, batch=tokens((1, 3, 1)), variant="rows")["cell"] == 1


# --- on and off -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_default_reads_outside_its_window(
    cache_type: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [tokens((2, 6, 3), (3, 3, 1), (1, 5, 2), kind=kind), tokens((3, 2, 1), kind=kind)]
    monkeypatch.setenv(FLAG, "0")
    plain = scattered(cache_type)
    expected = [forward(plain, batch) for batch in batches]
    monkeypatch.setenv(FLAG, "1")
    store = scattered(cache_type)
    assert store.sanitize and not plain.sanitize
    for batch, rows in zip(batches, expected, strict=True):
        np.testing.assert_array_equal(forward(store, batch), rows)
    for region in store.region(0):
        unwritten = np.array([4, 8, 16, 26, 39], np.int32)
        assert np.isnan(store.device.package().decode_cells(region, unwritten)).all()


def test_off_it_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLAG, "0")
    monkeypatch.setattr(sanitizer, "check", None)
    store = scattered("f32")
    batch = tokens((2, 6, 1))
    out = forward(store, batch, q=np.full((1, N_HEAD, HEAD_DIM), np.nan, np.float32))
    assert np.isnan(out).all()


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, asked in (("1", False), ("0", True)):
        monkeypatch.setenv(FLAG, text)
        assert KvStore(1, 4, 1, 32, sanitize=asked).sanitize is asked


# --- in an engine ---------------------------------------------------------------------------------


def prompted(path: Path, cache_type: str, **how: Any) -> Engine:
    engine = Engine.load(path, cache_type=cache_type, n_ctx=40, threads=1, **how)
    engine.store.reserve(7, 5)
    engine.store.reserve(0, 20)
    return engine


@pytest.mark.usefixtures("sanitized")
@pytest.mark.parametrize("cache_type", FORMATS)
def test_a_graph_is_checked_node_by_node(
    tiny_gguf: Path, cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = prompted(tiny_gguf, cache_type, sanitize=False)
    engine = prompted(tiny_gguf, cache_type)
    assert np.array_equal(engine.prefill([5, 9, 41]), plain.prefill([5, 9, 41]))
    damage(engine.store, 1, "v", 6)
    with pytest.raises(Refusal) as caught:
        engine.decode(8)
    facts = caught.value.facts
    assert caught.value.rule == "5.10"
    assert (facts["layer"], facts["which"], facts["cell"]) == (1, "V", 6)
    assert (facts["seq"], facts["position"], facts["window"]) == (0, 3, [(5, 4)])
    assert (facts["owner"], facts["cell_position"], facts["inside"]) == (0, 1, True)
    assert facts["variant"] == "attn_window_split"
    assert "kernels_numba/attn_window.py" in str(facts["file"])
    assert engine.store.written(0) == 3

    other = engine.with_cache(cache_type)
    assert other.store.sanitize and not plain.with_cache("f32").store.sanitize
    build = other._graphs.build
    faulty = (("attn_window", "past"),)
    monkeypatch.setattr(other._graphs, "build", lambda p: build(replace(p, variants=faulty)))
    other.store.reserve(0, 20)
    with pytest.raises(Refusal, match=r"K cell 2 .*outside the window") as caught:
        other.prefill([5, 9])
    facts = caught.value.facts
    assert (facts["layer"], facts["row"], facts["variant"]) == (0, 1, "attn_window_past")
    assert other.store.written(0) == 0
