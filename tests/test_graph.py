"""Graphs: identity from params alone, inputs checked before anything runs, memory given back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minfer import Batch, Engine, KvStore
from minfer.errors import Refusal
from minfer.format import KvFormat
from minfer.graph.cache import MAX_GRAPHS, GraphCache
from minfer.graph.params import GraphParams
from minfer.graph.run import execute, fill_batch_inputs
from minfer.kv.inputs import StepInputs
from minfer.window import WindowMode


@pytest.fixture
def engine(tiny_gguf: Path) -> Engine:
    return Engine.load(tiny_gguf, n_ctx=512, threads=1)


def decode_graph(engine: Engine, n_tokens: int = 1):
    return engine._graphs.build(
        GraphParams(
            n_tokens=n_tokens,
            n_out=n_tokens,
            kind="decode",
            stretches=engine.store.stretches,
            kv_format=KvFormat.F32,
            layout=engine.store.layout,
            windows=((WindowMode.CAUSAL, 0),) * engine.hp.n_layer,
        )
    )


def test_one_decode_graph_serves_500_positions(engine: Engine) -> None:
    engine.store.reserve(0, 512)
    logits = engine.prefill([5, 6], 0)
    graph = decode_graph(engine)
    for _ in range(500):
        token = int(np.argmax(logits))
        batch = Batch([0], [engine.store.written(0)], "decode", [token])
        with engine.store.step(batch) as step:
            inputs = fill_batch_inputs(graph, step.inputs, [token], [0], 512)
            logits = execute(graph, inputs, step)[0]
    assert engine.store.written(0) == 502
    fresh = Engine.load(engine.path, n_ctx=512, threads=1)
    fresh.store.reserve(0, 512)
    expected = fresh.prefill([5, 6], 0)
    for _ in range(500):
        expected = fresh.decode(int(np.argmax(expected)), 0)
    assert np.array_equal(logits, expected)
    assert fresh.graphs_built == 2  # the prompt's, and one for all decoded tokens


def test_receipts_cover_every_op(engine: Engine) -> None:
    graph = decode_graph(engine)
    ops = {receipt.op for receipt in graph.receipts}
    assert {n.op for n in graph.nodes} - {"reshape", "columns"} == ops
    assert {"attn_window", "matvec", "rms_norm", "qkv_rope_store"} <= ops
    assert "matmul" not in ops


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_tiles_have_the_height_of_the_bound_variant(engine: Engine, kind: str) -> None:
    graph = engine._graphs.build(replace(decode_graph(engine, 40).params, kind=kind))
    (receipt,) = [r for r in graph.receipts if r.op == "attn_window"]
    at = np.arange(40, dtype=np.int32)
    planned = StepInputs(kind, WindowMode.CAUSAL, (40,), at, at, None)
    filled = fill_batch_inputs(graph, planned, [5] * 40, range(40), 512)
    height = int(receipt.config.get("block_m", 1))
    assert filled["tiles", 0][:, 1].max() == height == (32 if kind == "prefill" else 1)


def test_intermediate_rows_are_dropped_after_their_last_use(engine: Engine) -> None:
    graph = decode_graph(engine)
    made = [slot for node in graph.nodes for slot in node.outputs]
    freed = [slot for node in graph.nodes for slot in node.frees]
    assert sorted(freed) == sorted(set(made) - {graph.output})
    for index, node in enumerate(graph.nodes):
        for later in graph.nodes[index + 1 :]:
            assert not set(node.frees) & set(later.inputs)


def good() -> StepInputs:
    at = np.array([3], np.int32)
    return StepInputs("decode", WindowMode.CAUSAL, (1,), at, at, None)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


BAD_INPUTS = {
    "token past the vocabulary": ({"tokens": [9999]}, "outside the vocabulary"),
    "negative token": ({"tokens": [-1]}, "outside the vocabulary"),
    "two tokens": ({"tokens": [1, 2]}, r"the graph takes \(1,\)"),
    "cell past the arena": ({"cells": i32(512)}, "outside the arena"),
    "negative cell": ({"cells": i32(-1)}, "outside the arena"),
    "position past the arena": ({"positions": i32(512)}, "past the last cell"),
    "output row past the batch": ({"out_rows": [1]}, "outside the batch"),
    "another window mode": ({"window": np.array([[0, 4]], np.int32)}, "built otherwise"),
    "window of odd size": ({"window": i32(1, 2, 3)}, "fits no mode"),
    "tile past the batch": ({"groups": (2,)}, "do not cut 1 queries"),
    "no tile": ({"groups": ()}, "do not cut 1 queries"),
}


@pytest.mark.parametrize(("over", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_fill_checks_every_bound(engine: Engine, over: dict, message: str) -> None:
    planned = replace(good(), **{k: v for k, v in over.items() if k not in ("tokens", "out_rows")})
    tokens, rows = over.get("tokens", [5]), over.get("out_rows", [0])
    graph = decode_graph(engine)
    assert fill_batch_inputs(graph, good(), [5], [0], 512)["tokens", 0].tolist() == [5]
    with pytest.raises(Refusal, match=message):
        fill_batch_inputs(graph, planned, tokens, rows, 512)


TILES = {
    "in order": ([[0, 2], [2, 1]], True),
    "zero rows at the end": ([[0, 3], [0, 0], [0, 0]], True),
    "a zero row between": ([[0, 2], [0, 0], [2, 1]], False),
    "a query left out": ([[0, 1], [2, 1]], False),
    "a query twice": ([[0, 2], [1, 2]], False),
    "too few": ([[0, 2]], False),
    "too many": ([[0, 3], [3, 1]], False),
    "a negative count": ([[0, 4], [4, -1]], False),
    "something after the end": ([[0, 3], [1, 0]], False),
}


@pytest.mark.parametrize(("tiles", "good"), TILES.values(), ids=TILES.keys())
def test_tiles_cut_the_batch_in_order(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tiles: list[list[int]], good: bool
) -> None:
    at = np.arange(3, dtype=np.int32)
    planned, graph = (
        StepInputs("decode", WindowMode.CAUSAL, (3,), at, at, None),
        decode_graph(engine, 3),
    )
    monkeypatch.setattr(StepInputs, "cut", lambda planned, block_m: np.array(tiles, np.int32))
    if good:
        fill_batch_inputs(graph, planned, [5] * 3, range(3), 512)
        return
    with pytest.raises(Refusal, match="do not cut 3 queries in order"):
        fill_batch_inputs(graph, planned, [5] * 3, range(3), 512)


@pytest.mark.parametrize(
    ("cache_type", "times", "held"),
    [("f16", 1, "f16 cells of 32"), ("f16", 2, "f16 cells of 64"), ("f32", 2, "f32 cells of 128")],
)
def test_a_graph_never_runs_on_cells_of_another_format_or_width(
    engine: Engine, cache_type: str, times: int, held: str
) -> None:
    graph = decode_graph(engine)
    hp = engine.hp
    store = KvStore(hp.n_layer, 16, times * hp.n_head_kv, hp.head_dim, cache_type=cache_type)
    store.reserve(0, 4)
    with (
        pytest.raises(Refusal, match=f"holds {held} words and the .* f32 cells of 64") as refused,
        store.step(Batch([0], [0], "decode", [5])) as step,
    ):
        execute(graph, fill_batch_inputs(graph, step.inputs, [5], [0], 16), step)
    assert refused.value.rule == "3.2"
    assert store.written(0) == 0


def params(n: int) -> GraphParams:
    return GraphParams(n, n, "decode", (), KvFormat.F32, "canonical", ())


def test_equal_params_reuse_a_graph_and_old_ones_leave() -> None:
    cache = GraphCache()
    made: list[GraphParams] = []

    def build(p: GraphParams):
        made.append(p)
        return object()

    first = cache.get(params(1), build)
    assert cache.get(params(1), build) is first
    for n in range(2, MAX_GRAPHS + 1):
        cache.get(params(n), build)
    assert cache.get(params(1), build) is first  # used last, so it stays
    cache.get(params(MAX_GRAPHS + 1), build)
    assert len(list(cache)) == MAX_GRAPHS
    cache.get(params(2), build)
    assert made.count(params(1)) == 1 and made.count(params(2)) == 2
